#pragma once
// Runs the moe4 binary and keeps what it printed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "moe4/safetensors.hpp"
#include "temporary_folder.hpp"

namespace moe4::test {

struct Finished {
    int exit_code = -1;  // -signal when a signal ended it
    std::string out, err;
    long peak_kilobytes = 0;

    nlohmann::json json() const { return nlohmann::json::parse(out); }  // throws for anything beside it
};

using Environment = std::vector<std::pair<std::string, std::string>>;

/// A running moe4; finish() waits for it.
class CommandLine {
public:
    /// Prints to a file of its own, or to `stdout_fd`.
    explicit CommandLine(std::vector<std::string> arguments, const Environment& environment = {},
                         int stdout_fd = -1) {
        arguments.insert(arguments.begin(), MOE4_BINARY);
        std::vector<char*> argv;
        for (std::string& argument : arguments) argv.push_back(argument.data());
        argv.push_back(nullptr);
        const int out = stdout_fd >= 0 ? stdout_fd : create(folder_ / "out");
        const int err = create(folder_ / "err");
        pid_ = ::fork();
        if (pid_ == 0) {
            ::dup2(out, STDOUT_FILENO);
            ::dup2(err, STDERR_FILENO);
            for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
            ::execv(argv[0], argv.data());
            ::_exit(127);
        }
        ::close(out);
        ::close(err);
    }

    pid_t pid() const { return pid_; }

    Finished finish() {
        int status = 0;
        rusage usage{};
        ::wait4(pid_, &status, 0, &usage);
        return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), read_file(folder_ / "out"),
                read_file(folder_ / "err"), usage.ru_maxrss};
    }

private:
    static int create(const std::filesystem::path& path) {
        return ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    }

    TemporaryFolder folder_;
    pid_t pid_ = -1;
};

inline Finished moe4(std::vector<std::string> arguments, const Environment& environment = {}) {
    return CommandLine(std::move(arguments), environment).finish();
}

/// The error as --json tells it, after checking that it is told on both streams alike.
inline nlohmann::json json_error(const Finished& finished) {
    const nlohmann::json error = finished.json().at("error");
    EXPECT_EQ(error.at("exit_code").get<int>(), finished.exit_code);
    EXPECT_NE(finished.err.find(error.at("message").get<std::string>()), std::string::npos) << finished.err;
    return error;
}

template <class T>
std::vector<T> tensor_values(const SafetensorsFile& file, std::string_view name) {
    const auto tensor = file.find(name);
    if (!tensor) throw std::runtime_error("no tensor " + std::string(name));
    std::vector<T> values(tensor->num_bytes() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), tensor->data, tensor->num_bytes());
    return values;
}

/// Names in a folder, to see that no half file stayed behind.
inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        names.push_back(entry.path().filename().string());
    }
    return names;
}

}  // namespace moe4::test
