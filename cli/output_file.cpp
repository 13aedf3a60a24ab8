#include "output_file.hpp"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <system_error>

#include "moe4/error.hpp"

namespace moe4::cli {

namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGXCPU};

std::string partial_path;  // a signal handler can be told nothing else

void remove_and_end(int signal) {
    ::unlink(partial_path.c_str());
    ::signal(signal, SIG_DFL);
    ::raise(signal);
}

}  // namespace

void refuse_to_overwrite(const std::filesystem::path& output, const std::filesystem::path& input) {
    std::error_code none;  // what does not exist is no other file
    if (std::filesystem::equivalent(output, input, none)) {
        throw Error(ErrorKind::invalid_argument, output.string() +
                                                     " is an input of this command, expected another "
                                                     "file for --output");
    }
    if (!std::filesystem::is_directory(input, none)) return;
    for (const auto& file : std::filesystem::directory_iterator(input, none)) {
        if (file.is_regular_file(none)) refuse_to_overwrite(output, file.path());
    }
}

OutputFile::Guard::Guard(const std::filesystem::path& path) {
    partial_path = SafetensorsWriter::partial_path(path).string();
    ::signal(SIGXFSZ, SIG_IGN);  // a file that grows too large is then an error like a full disk
    for (const int signal : kSignals) {
        if (::signal(signal, remove_and_end) == SIG_IGN) ::signal(signal, SIG_IGN);  // as nohup asked
    }
}

OutputFile::Guard::~Guard() {
    for (const int signal : kSignals) {
        if (::signal(signal, SIG_DFL) == SIG_IGN) ::signal(signal, SIG_IGN);
    }
}

}  // namespace moe4::cli
