#include "output.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace moe4::cli {

namespace {

/// Names come from files that anybody may have written: their control characters stay out of the terminal.
std::string printable(std::string_view text) {
    std::string safe(text);
    for (char& c : safe) {
        const auto byte = static_cast<unsigned char>(c);
        if ((byte < 0x20 && c != '\n') || byte == 0x7F) c = '?';
    }
    return safe;
}

const char* name_of(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::invalid_argument:
            return "invalid_argument";
        case ErrorKind::unsupported:
            return "unsupported";
        case ErrorKind::broken_file:
            return "broken_file";
        case ErrorKind::machine:
            return "machine";
    }
    return "machine";
}

void write_stdout(std::string_view text) {
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
        throw Error(ErrorKind::machine, fmt::format("stdout cannot be written: {}", std::strerror(errno)));
    }
}

}  // namespace

void print(std::string_view text) { write_stdout(printable(text)); }

void print_json(const Json& document) {
    write_stdout(document.dump(2, ' ', false, Json::error_handler_t::replace) +
                 "\n");  // names may be no UTF-8
}

Json error_document(const Error& error) {
    return {{"error",
             {{"kind", name_of(error.kind())},
              {"message", error.what()},
              {"exit_code", static_cast<int>(error.kind())}}}};
}

void note(std::string_view sentence) { write_stderr(fmt::format("moe4: {}\n", printable(sentence))); }

void write_stderr(std::string_view text) {
    // A stderr that cannot be written is no reason to fail, nor to say so.
    (void)std::fwrite(text.data(), 1, text.size(), stderr);
}

namespace {

bool is_number(const std::string& cell) {
    return !cell.empty() &&
           (std::isdigit(static_cast<unsigned char>(cell.front())) != 0 || cell.front() == '-');
}

}  // namespace

std::string Table::to_string() const {
    const std::size_t num_columns = rows_.front().size();
    std::vector<std::size_t> widths(num_columns, 0);
    std::vector<bool> is_right(num_columns, true);
    for (std::size_t column = 0; column < num_columns; ++column) {
        for (const auto& row : rows_) widths[column] = std::max(widths[column], row[column].size());
        is_right[column] = std::all_of(rows_.begin() + 1, rows_.end(),
                                       [&](const auto& row) { return is_number(row[column]); });
    }
    std::string text;
    for (const auto& row : rows_) {
        std::string line;
        for (std::size_t column = 0; column < num_columns; ++column) {
            line += is_right[column] ? fmt::format("  {:>{}}", row[column], widths[column])
                                     : fmt::format("  {:<{}}", row[column], widths[column]);
        }
        line.erase(line.find_last_not_of(' ') + 1);
        text += line + "\n";
    }
    return text;
}

std::string format_bytes(std::uint64_t bytes) {
    constexpr const char* kUnits[] = {"kB", "MB", "GB", "TB"};
    if (bytes < 1000) return fmt::format("{} B", bytes);
    double value = static_cast<double>(bytes) / 1000.0;
    std::size_t unit = 0;
    for (; value >= 999.95 && unit + 1 < std::size(kUnits); ++unit) value /= 1000.0;
    return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace moe4::cli
