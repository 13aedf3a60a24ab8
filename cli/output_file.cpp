#include "output_file.hpp"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace moe4::cli {

namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

std::string partial_path;  // a signal handler can be told nothing else

void remove_and_end(int signal) {
    ::unlink(partial_path.c_str());
    ::signal(signal, SIG_DFL);
    ::raise(signal);
}

}  // namespace

OutputFile::Guard::Guard(const std::filesystem::path& path) {
    partial_path = path.string() + ".partial-" + std::to_string(::getpid());
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
