#pragma once
// The error that a call throws, so that a test can look at its kind and its sentence.
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "moe4/error.hpp"

namespace moe4::test {

template <class Call>
std::optional<Error> error_of(Call call) {
    try {
        call();
    } catch (const Error& error) {
        return error;
    }
    return std::nullopt;
}

/// The sentence of the error that the call throws, which is of this kind; "none" where it throws none.
template <class Call>
std::string refusal(Call call, ErrorKind kind) {
    const std::optional<Error> error = error_of(call);
    if (!error) return "none";
    EXPECT_EQ(error->kind(), kind) << error->what();
    return error->what();
}

/// The call throws this kind, and its sentence holds every part.
template <class Call, class... Part>
void expect_error(ErrorKind kind, Call call, const Part&... parts) {
    const std::optional<Error> error = error_of(call);
    ASSERT_TRUE(error.has_value()) << "nothing was thrown";
    EXPECT_EQ(error->kind(), kind) << error->what();
    const std::string sentence = error->what();
    for (const std::string& part : {std::string(parts)...})
        EXPECT_NE(sentence.find(part), std::string::npos) << sentence << "\nlacks: " << part;
}

}  // namespace moe4::test
