#include "moe4/safetensors.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "checkpoint/mapped_file.hpp"
#include "checkpoint/safetensors_header.hpp"
#include "moe4/error.hpp"

namespace moe4 {

struct SafetensorsFile::State {
    std::shared_ptr<const checkpoint::MappedFile> file;
    checkpoint::SafetensorsHeader header;
};

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
    auto state = std::make_shared<State>();
    state->file = checkpoint::MappedFile::open(path, ErrorKind::invalid_argument);
    state->header = checkpoint::parse_safetensors_header(state->file->text(), path.string());
    SafetensorsFile file;
    file.state_ = std::move(state);
    return file;
}

std::span<const SafetensorsFile::Entry> SafetensorsFile::entries() const { return state_->header.entries; }

std::optional<TensorView> SafetensorsFile::find(std::string_view name) const {
    const auto& entries = state_->header.entries;
    const auto found =
        std::lower_bound(entries.begin(), entries.end(), name,
                         [](const Entry& entry, std::string_view n) { return entry.name < n; });
    if (found == entries.end() || found->name != name) return std::nullopt;
    return found->tensor;
}

std::shared_ptr<const void> SafetensorsFile::owner() const { return state_; }

namespace {

std::string header_of(std::span<const TensorSpec> tensors) {
    std::string json = R"({"__metadata__":{"format":"pt"})";
    std::size_t begin = 0;
    for (const TensorSpec& tensor : tensors) {
        const std::size_t end = begin + TensorView{nullptr, tensor.dtype, tensor.shape, {}}.num_bytes();
        json += ",";
        json += checkpoint::json_string(tensor.name);
        json += R"(:{"dtype":")" + std::string(dtype_name(tensor.dtype));
        json += R"(","shape":)" + tensor.shape.to_string();
        json += R"(,"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
        begin = end;
    }
    json += "}";
    json.resize((json.size() + 7) / 8 * 8, ' ');  // so that the data begin at a multiple of 8
    return json;
}

}  // namespace

struct SafetensorsWriter::State {
    std::filesystem::path path;
    std::filesystem::path partial;
    std::FILE* file = nullptr;
    std::size_t bytes_left = 0;  // of the tensors' data

    [[noreturn]] void fail(const std::filesystem::path& where) const {
        throw Error(ErrorKind::machine, where.string() + ": cannot be written: " + std::strerror(errno));
    }
    void write(const void* data, std::size_t bytes) const {
        if (bytes > 0 && std::fwrite(data, 1, bytes, file) != bytes) fail(partial);
    }
};

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorSpec> tensors)
    : state_(std::make_unique<State>()) {
    state_->path = path;
    state_->partial = partial_path(path);
    std::error_code ignored;  // whatever it is, fopen says it too
    const auto status = std::filesystem::status(path, ignored);
    if (exists(status) &&
        !is_regular_file(status)) {  // the rename would put a file in the place of /dev/null
        throw Error(ErrorKind::machine, path.string() + ": cannot be written: it is not a regular file");
    }
    for (const TensorSpec& tensor : tensors) {
        state_->bytes_left += TensorView{nullptr, tensor.dtype, tensor.shape, {}}.num_bytes();
    }
    state_->file = std::fopen(state_->partial.c_str(), "wb");
    if (state_->file == nullptr) state_->fail(path);
    try {
        const std::string header = header_of(tensors);
        const std::uint64_t length = header.size();
        state_->write(&length, sizeof length);
        state_->write(header.data(), header.size());
    } catch (...) {
        discard();
        throw;
    }
}

SafetensorsWriter::~SafetensorsWriter() { discard(); }

std::filesystem::path SafetensorsWriter::partial_path(const std::filesystem::path& path) {
    return path.string() + ".partial-" + std::to_string(::getpid());
}

void SafetensorsWriter::discard() noexcept {
    if (state_->file == nullptr) return;
    std::fclose(state_->file);
    state_->file = nullptr;
    std::remove(state_->partial.c_str());
}

void SafetensorsWriter::append(const void* data, std::size_t bytes) {
    if (bytes > state_->bytes_left) {
        throw Error(ErrorKind::invalid_argument,
                    state_->path.string() + ": more data than the tensors that were announced");
    }
    state_->write(data, bytes);
    state_->bytes_left -= bytes;
}

void SafetensorsWriter::finish() {
    if (state_->bytes_left > 0) {
        throw Error(ErrorKind::invalid_argument,
                    state_->path.string() + ": less data than the tensors that were announced");
    }
    std::FILE* file = std::exchange(state_->file, nullptr);
    const bool is_closed = std::fclose(file) == 0;  // writes what is buffered
    if (!is_closed || std::rename(state_->partial.c_str(), state_->path.c_str()) != 0) {
        const int reason = errno;
        std::remove(state_->partial.c_str());
        errno = reason;
        state_->fail(state_->path);
    }
}

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors) {
    std::vector<TensorSpec> specs;
    for (const NamedTensor& t : tensors) specs.push_back({t.name, t.tensor.dtype, t.tensor.shape});
    SafetensorsWriter writer(path, specs);
    for (const NamedTensor& t : tensors) writer.append(t.tensor.data, t.tensor.num_bytes());
    writer.finish();
}

}  // namespace moe4
