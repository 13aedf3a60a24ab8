#pragma once
// The exception that leaves the library (beside std::bad_alloc), and what its kinds mean.
#include <stdexcept>
#include <string>

namespace moe4 {

/// Whose fault it is. The command line exits with the number.
enum class ErrorKind {
    invalid_argument = 2,  // the caller: arguments, or inputs that do not fit the layer
    unsupported = 3,       // the checkpoint asks for something this library does not do
    broken_file = 4,       // a file lies about itself, or what it holds cannot mean anything
    machine = 5,           // memory, a device or a disk failed
};

/// what() is one sentence that names tensor, layer, expert, found and expected, as far as they apply. Control
/// characters, which names in files may hold, are spelled as in JSON (\u0000).
class Error : public std::runtime_error {
public:
    Error(ErrorKind kind, const std::string& sentence);
    ErrorKind kind() const { return kind_; }

private:
    ErrorKind kind_;
};

}  // namespace moe4
