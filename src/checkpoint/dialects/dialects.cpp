#include "checkpoint/dialects/dialect.hpp"

namespace moe4::checkpoint {

std::span<const Dialect* const> dialects() {
    static const Dialect* const kDialects[] = {
        &compressed_tensors(), &modelopt(),  // add yours here
    };
    return kDialects;
}

}  // namespace moe4::checkpoint
