// Any bytes as a safetensors file: refused with moe4::Error or parsed into entries that lie within the file.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "checkpoint/safetensors_header.hpp"
#include "moe4/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    // Half of the inputs get a true header length, or hardly any would reach the JSON.
    std::string file(reinterpret_cast<const char*>(data), size);
    if (size > 0 && data[0] % 2 == 0) {
        const std::uint64_t length = size - 1;
        file.replace(0, 1, reinterpret_cast<const char*>(&length), sizeof length);
    }
    try {
        const auto header = moe4::checkpoint::parse_safetensors_header(file, "fuzz");
        for (const auto& entry : header.entries) {
            const char* begin = static_cast<const char*>(entry.tensor.data);
            const char* end = file.data() + file.size();
            if (begin < file.data() || begin > end) std::abort();
            if (entry.tensor.num_bytes() > static_cast<std::size_t>(end - begin)) std::abort();
        }
    } catch (const moe4::Error&) {
    }
    return 0;
}
