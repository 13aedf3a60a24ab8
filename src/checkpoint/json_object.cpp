#include "checkpoint/json_object.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include "moe4/error.hpp"

namespace moe4::checkpoint {

using nlohmann::json;

namespace {

constexpr int kMaxDepth = 64;
constexpr std::size_t kMaxBytes = std::size_t{32} << 20;  // a document takes ten times its text

std::string printed(const json& value) {
    constexpr std::size_t kMaxLength = 60;
    if (value.is_object()) return "an object";
    if (value.is_array()) return "an array";
    std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
    if (text.size() > kMaxLength) text.replace(kMaxLength, std::string::npos, "...");
    return text;
}

}  // namespace

void fail_at(const std::string& where, const std::string& what) {
    throw Error(ErrorKind::broken_file, where + " " + what);
}

json parse_json(std::string_view text, const std::string& file) {
    if (text.size() > kMaxBytes) fail_at(file, "is larger than 32 MiB");
    std::vector<std::set<std::string>> keys;
    const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
        if (depth > kMaxDepth) fail_at(file, "is nested more than 64 levels deep");
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end) keys.pop_back();
        if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
            fail_at(file, "holds the key " + printed(parsed) + " twice in one object");
        return true;
    };
    try {
        json document = json::parse(text.begin(), text.end(), check);
        if (!document.is_object()) fail_at(file, "is " + printed(document) + ", expected a JSON object");
        return document;
    } catch (const json::parse_error& error) {
        const std::string_view before = text.substr(0, error.byte);
        const auto line = std::count(before.begin(), before.end(), '\n') + 1;
        fail_at(file, "is not valid JSON at line " + std::to_string(line) + " (byte " +
                          std::to_string(error.byte) + ")");
    } catch (const json::out_of_range&) {
        fail_at(file, "holds a number that is out of range");
    }
}

template <class Element>
void JsonObject::each_element(std::string_view key, Element element) const {
    const json* value = find(key);
    if (value == nullptr) return;
    if (!value->is_array()) refuse(key, *value, "an array");
    for (const json& e : *value) element(e);
}

std::string JsonObject::where(std::string_view key) const {
    return where_ + (where_.ends_with(": ") ? "" : ".") + std::string(key);
}

const json* JsonObject::find(std::string_view key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
}

std::optional<JsonObject> JsonObject::object(std::string_view key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_object()) refuse(key, *value, "an object");
    return JsonObject(*value, where(key));
}

std::optional<std::string> JsonObject::string(std::string_view key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) refuse(key, *value, "a string");
    return value->get<std::string>();
}

std::optional<bool> JsonObject::boolean(std::string_view key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) refuse(key, *value, "true or false");
    return value->get<bool>();
}

std::optional<double> JsonObject::number(std::string_view key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || !std::isfinite(value->get<double>())) refuse(key, *value, "a finite number");
    return value->get<double>();
}

std::optional<std::int64_t> JsonObject::integer(std::string_view key, std::int64_t min,
                                                std::int64_t max) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    return checked_integer(key, *value, min, max);
}

std::vector<std::int64_t> JsonObject::integers(std::string_view key, std::int64_t min,
                                               std::int64_t max) const {
    std::vector<std::int64_t> result;
    each_element(key, [&](const json& e) { result.push_back(checked_integer(key, e, min, max)); });
    return result;
}

std::vector<std::string> JsonObject::strings(std::string_view key) const {
    std::vector<std::string> result;
    each_element(key, [&](const json& e) {
        if (!e.is_string()) refuse(key, e, "strings");
        result.push_back(e.get<std::string>());
    });
    return result;
}

void JsonObject::refuse(std::string_view key, const json& found, const std::string& expected) const {
    fail_at(where(key), "is " + printed(found) + ", expected " + expected);
}

std::int64_t JsonObject::checked_integer(std::string_view key, const json& value, std::int64_t min,
                                         std::int64_t max) const {
    const bool fits = value.is_number_unsigned()
                          ? value.get<std::uint64_t>() <= static_cast<std::uint64_t>(max) &&
                                value.get<std::int64_t>() >= min
                          : value.is_number_integer() && value.get<std::int64_t>() >= min &&
                                value.get<std::int64_t>() <= max;
    if (!fits) {
        refuse(key, value, "a whole number from " + std::to_string(min) + " to " + std::to_string(max));
    }
    return value.get<std::int64_t>();
}

}  // namespace moe4::checkpoint
