#pragma once
// The reasons not to run a layer. All are collected: inspect lists them, moe_layer throws the first.
#include <string>
#include <vector>

#include "moe4/error.hpp"

namespace moe4::checkpoint {

using Refusals = std::vector<Error>;

inline void refuse_unsupported(Refusals& refusals, const std::string& sentence) {
    refusals.emplace_back(ErrorKind::unsupported, sentence);
}
inline void refuse_broken(Refusals& refusals, const std::string& sentence) {
    refusals.emplace_back(ErrorKind::broken_file, sentence);
}

}  // namespace moe4::checkpoint
