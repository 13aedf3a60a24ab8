#pragma once
// What `moe4 inspect` says: of a layer, and of what files and tensors disagree about.
#include <string>
#include <vector>

#include "checkpoint/layer_reading.hpp"
#include "moe4/checkpoint.hpp"

namespace moe4::checkpoint {

LayerInfo inspect_layer(const OpenedCheckpoint&, int layer, Checkpoint::Scan);

std::vector<std::string> find_disagreements(const OpenedCheckpoint&);
std::vector<std::string> find_unmatched(const OpenedCheckpoint&);
std::vector<std::string> find_unused(const OpenedCheckpoint&);

/// "0 to 3, 5"; numbers ascending.
std::string list_of_layers(const std::vector<int>&);

}  // namespace moe4::checkpoint
