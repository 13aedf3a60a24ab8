#include "arguments.hpp"

#include <algorithm>

namespace moe4::cli {

CLI::Validator one_of(const std::vector<std::string>& words) {
    const auto fault = [=](const std::string& text) -> std::string {
        if (std::find(words.begin(), words.end(), text) != words.end()) return "";
        const std::string all_but_last = fmt::format("{}", fmt::join(words.begin(), words.end() - 1, ", "));
        return fmt::format("is \"{}\", expected {} or {}", text, all_but_last, words.back());
    };
    return {fault, fmt::format("{{{}}}", fmt::join(words, ","))};
}

void add_json_option(CLI::App& command, bool& is_json) {
    command.add_flag("--json", is_json, "one JSON document instead of text");
}

void refuse_empty_arguments(CLI::App& command) {
    const CLI::Validator is_not_empty(
        [](const std::string& text) { return std::string(text.empty() ? "is empty, expected a value" : ""); },
        "");
    for (CLI::Option* option : command.get_options()) {
        if (option->get_items_expected_max() > 0) option->check(is_not_empty);
    }
}

Error usage_error(const CLI::App& app, const CLI::ParseError& error) {
    const auto chosen = app.get_subcommands();
    const std::string called = chosen.empty() ? "moe4" : "moe4 " + chosen.front()->get_name();
    const std::string text = error.what();
    const std::string option = text.substr(0, text.find_first_of(": "));  // where the text begins with one
    std::string sentence = text;
    switch (static_cast<CLI::ExitCodes>(error.get_exit_code())) {
        case CLI::ExitCodes::ExtrasError:
            sentence = fmt::format("{} does not know {}", called, app.remaining(true).front());
            break;
        case CLI::ExitCodes::ValidationError:
            sentence.erase(option.size(), 1);
            break;
        case CLI::ExitCodes::RequiredError:
            sentence = option + " is missing";
            break;
        case CLI::ExitCodes::ArgumentMismatch: {
            const bool is_repeated = text.find("At Most") != std::string::npos;
            sentence = option + (is_repeated ? " is given more than once" : " lacks its value");
            break;
        }
        case CLI::ExitCodes::ConversionError:
            sentence = "an option that takes no value has one";
            break;
        default:
            break;
    }
    return {ErrorKind::invalid_argument, fmt::format("{} (see {} --help)", sentence, called)};
}

}  // namespace moe4::cli
