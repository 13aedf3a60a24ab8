#pragma once
// JSON documents of a person's size (configurations), read as what is expected or refused in a sentence.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moe4::checkpoint {

/// Throws broken_file: "<where> <what>".
[[noreturn]] void fail_at(const std::string& where, const std::string& what);

/// `text` is that of `file`, an object. Equal keys in one object and nesting without limit, which the JSON
/// library lets pass, are refused too. Throws broken_file.
nlohmann::json parse_json(std::string_view text, const std::string& file);

/// A JSON object whose members have the type that is asked for, or are refused: broken_file naming the place,
/// what was found and what is expected. A member that is absent or null is empty.
class JsonObject {
public:
    /// `where` opens every message: "config.json: " or "config.json: quantization_config". Borrows `object`.
    JsonObject(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {}

    std::string where(
        std::string_view key) const;  // of a member: "config.json: quantization_config.producer"

    const nlohmann::json* find(std::string_view key) const;  // of any type; nullptr: absent or null
    std::optional<JsonObject> object(std::string_view key) const;
    std::optional<std::string> string(std::string_view key) const;
    std::optional<bool> boolean(std::string_view key) const;
    std::optional<double> number(std::string_view key) const;  // finite
    std::optional<std::int64_t> integer(std::string_view key, std::int64_t min, std::int64_t max) const;
    /// Elements of an array; none where it is absent.
    std::vector<std::int64_t> integers(std::string_view key, std::int64_t min, std::int64_t max) const;
    std::vector<std::string> strings(std::string_view key) const;

    /// member(name, object) for every member of an object of objects; nothing when the key is absent.
    template <class Member>
    void each(std::string_view key, Member member) const {
        const auto container = object(key);
        if (!container) return;
        for (const auto& [name, value] : container->object_.items()) {
            if (!value.is_object()) container->refuse(name, value, "an object");
            member(name, JsonObject(value, container->where(name)));
        }
    }

private:
    [[noreturn]] void refuse(std::string_view key, const nlohmann::json& found,
                             const std::string& expected) const;
    std::int64_t checked_integer(std::string_view key, const nlohmann::json& value, std::int64_t min,
                                 std::int64_t max) const;
    template <class Element>
    void each_element(std::string_view key, Element element) const;

    const nlohmann::json& object_;
    std::string where_;
};

}  // namespace moe4::checkpoint
