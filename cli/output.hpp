#pragma once
// What a command prints: text, tables or one JSON document on stdout, notes on stderr.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "moe4/error.hpp"

namespace moe4::cli {

using Json = nlohmann::ordered_json;  // a NaN or an infinity is printed as null

void print(std::string_view text);  // throws machine when stdout cannot be written
void print_json(const Json& document);
Json error_document(const Error& error);   // {"error": {"kind", "message", "exit_code"}}
void note(std::string_view sentence);      // "moe4: <sentence>" on stderr
void write_stderr(std::string_view text);  // as it is; never fails

/// Columns as wide as their widest cell; those that hold only numbers are flush right.
class Table {
public:
    explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
    void add_row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
    std::string to_string() const;

private:
    std::vector<std::vector<std::string>> rows_;
};

std::string format_bytes(std::uint64_t bytes);  // "1.3 GB", decimal

}  // namespace moe4::cli
