#pragma once
// What `moe4 bench` measured, as text, JSON and HTML.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "moe4/backend.hpp"
#include "output.hpp"

namespace moe4::cli {

struct BenchRow {
    std::string shape;
    std::string mode;
    std::string routing;
    std::int64_t tokens = 0;
    std::string kernel;      // that served the average expert
    double us = 0.0;         // median of a run
    double gb_per_s = 0.0;   // of packed weights of the experts hit
    double gop_per_s = 0.0;  // a multiply-add is two
    double operations_per_byte = 0.0;
    std::string limit;         // which binds
    double limit_value = 0.0;  // GB/s for dram_read, else GOP/s
    double ratio = 0.0;
};

struct BenchReport {
    std::string machine;
    int threads = 0;
    std::vector<MachineLimit> limits;
    std::vector<BenchRow> rows;
};

std::string text_of(const BenchReport&);
Json json_of(const BenchReport&);
/// Throws machine where write_html would.
void refuse_unwritable(const std::filesystem::path& path);
/// One self-contained page: a roofline plot and the table. Written beside and renamed. Throws machine.
void write_html(const BenchReport& report, const std::filesystem::path& path);

}  // namespace moe4::cli
