// The safetensors reader on every way a file can lie, and the writer.
#include "moe4/safetensors.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "moe4/error.hpp"
#include "temporary_folder.hpp"

namespace moe4 {
namespace {

using test::TemporaryFolder;

std::string file_of(const std::string& header, const std::string& data, std::uint64_t claimed_length) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &claimed_length, 8);
    return bytes + header + data;
}
std::string file_of(const std::string& header, const std::string& data) {
    return file_of(header, data, header.size());
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  std::uint64_t begin, std::uint64_t end) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":[" +
           std::to_string(begin) + "," + std::to_string(end) + "]}";
}

/// What opening says; empty when it does not refuse. Checks kind, file name, time and memory on the way.
std::string refusal(const std::string& bytes) {
    const TemporaryFolder folder;
    const auto path = folder.write("broken.safetensors", bytes);
    const auto start = std::chrono::steady_clock::now();
    rusage before{};
    getrusage(RUSAGE_SELF, &before);
    std::string message;
    try {
        SafetensorsFile::open(path);
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::broken_file);
        message = error.what();
        EXPECT_NE(message.find("broken.safetensors: "), std::string::npos) << message;
    }
    rusage after{};
    getrusage(RUSAGE_SELF, &after);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
    EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 200 * 1024) << "KB";
    return message;
}

struct BrokenFile {
    const char* name;
    std::string bytes;
    const char* expected;  // what the message says
};

class Broken : public testing::TestWithParam<BrokenFile> {};

TEST_P(Broken, IsRefusedWithOneSentence) {
    const std::string message = refusal(GetParam().bytes);
    EXPECT_NE(message.find(GetParam().expected), std::string::npos) << "found: " << message;
}

const std::string kTwo = "{" + entry("a", "F32", "[2]", 0, 8) + "," + entry("b", "U8", "[4]", 8, 12) + "}";
const std::string kTwoData = "0123456789AB";
std::string one(const std::string& dtype, const std::string& shape, std::uint64_t begin, std::uint64_t end) {
    return file_of("{" + entry("w", dtype, shape, begin, end) + "}", std::string(end > 64 ? 0 : end, 'x'));
}
std::string shaped(const std::string& members) { return file_of("{\"w\":{" + members + "}}", "xxxx"); }

INSTANTIATE_TEST_SUITE_P(
    Files, Broken,
    testing::Values(
        BrokenFile{"Empty", "", "is 0 bytes long"}, BrokenFile{"SevenBytes", "1234567", "is 7 bytes long"},
        BrokenFile{"ZeroHeader", file_of("", "xx"), "does not begin with '{'"},
        BrokenFile{"AllZero", std::string(4096, '\0'), "does not begin with '{'"},
        BrokenFile{"Text", "This file is part of no model at all, it is a note to whoever reads it.",
                   "is not a safetensors file"},
        BrokenFile{"Png", std::string("\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 16), "is not a safetensors file"},
        BrokenFile{"HugeHeader", file_of("{}", "", UINT64_MAX),
                   "claims a header of 18446744073709551615 bytes"},
        BrokenFile{"HeaderOver100MB", file_of("{}", "", 100'000'001), "expected at most 100000000"},
        BrokenFile{"HeaderBeyondFile", file_of("{}", "", 99'999'999),
                   "claims a header of 99999999 bytes, but 2 follow"},
        BrokenFile{"LfsPointer", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
                   "is a Git LFS pointer, expected the file itself"},
        BrokenFile{"SpacesFirst", file_of(" {}", ""), "does not begin with '{'"},
        BrokenFile{"TruncatedByOne", file_of(kTwo, kTwoData.substr(1)), "need 12 bytes, but 11 follow"},
        BrokenFile{"TrailingByte", file_of(kTwo, kTwoData + "x"),
                   "need 12 bytes, but 13 follow the header: 1 at the end belong to no tensor"},
        BrokenFile{"TrailingBytesOfNoTensor", file_of("{}", "x"),
                   "need 0 bytes, but 1 follow the header: 1 at the end belong to no tensor"},
        BrokenFile{
            "Overlap",
            file_of("{" + entry("a", "U8", "[8]", 0, 8) + "," + entry("b", "U8", "[5]", 7, 12) + "}",
                    kTwoData),
            "tensor \"b\" begins at byte 7 of the data and overlaps the tensor before it, which ends at 8"},
        BrokenFile{
            "SameBytesTwice",
            file_of("{" + entry("a", "U8", "[12]", 0, 12) + "," + entry("b", "U8", "[12]", 0, 12) + "}",
                    kTwoData),
            "overlaps"},
        BrokenFile{"Gap",
                   file_of("{" + entry("a", "U8", "[8]", 0, 8) + "," + entry("b", "U8", "[3]", 9, 12) + "}",
                           kTwoData),
                   "1 bytes before tensor \"b\" belong to no tensor"},
        BrokenFile{"DoesNotBeginAtZero", one("U8", "[3]", 1, 4), "1 bytes before tensor \"w\""},
        BrokenFile{"DuplicateName",
                   file_of("{" + entry("a", "U8", "[6]", 0, 6) + "," + entry("a", "U8", "[6]", 6, 12) + "}",
                           kTwoData),
                   "tensor \"a\" stands twice"},
        BrokenFile{
            "DuplicateNameByEscape",
            file_of("{" + entry("a", "U8", "[6]", 0, 6) + "," + entry("\\u0061", "U8", "[6]", 6, 12) + "}",
                    kTwoData),
            "tensor \"a\" stands twice"},
        BrokenFile{"UnknownDtype", one("F128", "[1]", 0, 16), "tensor \"w\" has the unknown dtype \"F128\""},
        BrokenFile{"ShapeAndBytesDiffer", one("F32", "[2]", 0, 4),
                   "tensor \"w\" is F32 [2] and needs 8 bytes, but its data_offsets span 4"},
        BrokenFile{"OverflowingShape", one("F32", "[4294967296,4294967296,4]", 0, 0),
                   "no possible number of bytes"},
        BrokenFile{"OverflowToZero", one("U8", "[4294967296,4294967296]", 0, 0),
                   "no possible number of bytes"},
        BrokenFile{"SizeOver63Bits", one("U8", "[9223372036854775808]", 0, 0),
                   "a dimension of 9223372036854775808"},
        BrokenFile{"SizeOver64Bits", one("U8", "[99999999999999999999]", 0, 0), "does not fit into 64 bits"},
        BrokenFile{"NineDimensions", one("U8", "[1,1,1,1,1,1,1,1,1]", 0, 1), "more than 8 dimensions"},
        BrokenFile{"HalfAByte", one("F4", "[3]", 0, 2), "no possible number of bytes"},
        BrokenFile{"BackwardOffsets", one("U8", "[4]", 4, 0), "ends at byte 0, before it begins at 4"},
        BrokenFile{"NegativeSize", one("U8", "[-1]", 0, 1), "whole number of 0 or more"},
        BrokenFile{"FractionalSize", one("U8", "[1.0]", 0, 1), "whole number"},
        BrokenFile{"LeadingZero", one("U8", "[01]", 0, 1), "whole number"},
        BrokenFile{"ThreeOffsets", shaped("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4,4]"),
                   "more than two data_offsets"},
        BrokenFile{"NoShape", shaped("\"dtype\":\"U8\",\"data_offsets\":[0,4]"),
                   "lacks its dtype, shape or data_offsets"},
        BrokenFile{"TwoShapes", shaped("\"dtype\":\"U8\",\"shape\":[4],\"shape\":[4],\"data_offsets\":[0,4]"),
                   "two shape"},
        BrokenFile{"TwoDtypes",
                   shaped("\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]"),
                   "two dtype"},
        BrokenFile{"OneOffset", shaped("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4]"),
                   "lacks its dtype, shape or data_offsets"},
        BrokenFile{"TwoMetadata", file_of("{\"__metadata__\":{},\"__metadata__\":{}}", ""),
                   "two __metadata__"},
        BrokenFile{"NotJson", file_of("{hello}", ""), "expected '\"'"},
        BrokenFile{"CutJson", file_of("{\"w\":{\"dtype\":\"U8\"", ""), "ends early"},
        BrokenFile{"JsonGoesOn", file_of("{}{}", ""), "goes on after its end"},
        BrokenFile{"TrailingComma", file_of("{\"__metadata__\":{},}", ""), "expected '\"'"},
        BrokenFile{"ControlCharacter", file_of("{\"a\nb\":1}", ""), "control character"},
        BrokenFile{"HalfSurrogate", file_of("{\"\\ud800x\":1}", ""), "surrogate"},
        BrokenFile{"BadEscape", file_of("{\"\\x\":1}", ""), "unknown escape"},
        BrokenFile{"NotUtf8", file_of("{\"\xff\":1}", ""), "not valid UTF-8"},
        BrokenFile{"OverlongUtf8", file_of("{\"\xc0\x80\":1}", ""), "not valid UTF-8"},
        BrokenFile{"MetadataNumber", file_of("{\"__metadata__\":{\"a\":1}}", ""), "expected '\"'"},
        BrokenFile{"EntryIsArray", file_of("{\"w\":[]}", ""), "expected '{'"},
        BrokenFile{"DeepNesting", file_of("{\"w\":" + std::string(1'000'000, '['), ""), "expected '{'"}),
    [](const auto& instance) { return std::string(instance.param.name); });

TEST(Safetensors, AbsentFilesAndFolders) {
    const TemporaryFolder folder;
    for (const auto& path : {folder / "absent.safetensors", folder.path()}) {
        try {
            SafetensorsFile::open(path);
            ADD_FAILURE() << "opened " << path;
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
            EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos);
        }
    }
}

TEST(Safetensors, ReadsWhatIsLegal) {
    const TemporaryFolder folder;
    const std::string header =
        "{ \"__metadata__\" : {\"format\":\"pt\"} ,\n" + entry("scalar", "F32", "[]", 1, 5) + "," +
        entry("a\\u00e9\\n\\ud83d\\ude00\\/", "U8", "[1,1,1,1,1,1,1,1]", 0, 1) + "," +
        entry("empty", "BF16", "[3,0]", 5, 5) + "," + entry("nibbles", "F4", "[2,3]", 5, 8) + "}   ";
    const auto path =
        folder.write("good.safetensors", file_of(header, "x\x00\x00\x80\x3fyyy" + std::string()));
    // The literal stops at its first zero byte, so the bytes are laid out here.
    std::string data = "x";
    const float one = 1.0F;
    data.append(reinterpret_cast<const char*>(&one), 4).append("yyy");
    folder.write("good.safetensors", file_of(header, data));
    const auto file = SafetensorsFile::open(path);
    ASSERT_EQ(file.entries().size(), 4U);
    EXPECT_TRUE(std::is_sorted(file.entries().begin(), file.entries().end(),
                               [](const auto& a, const auto& b) { return a.name < b.name; }));
    const auto scalar = file.find("scalar");
    ASSERT_TRUE(scalar);
    float value = 0;
    std::memcpy(&value, scalar->data, 4);
    EXPECT_EQ(value, 1.0F);
    EXPECT_EQ(scalar->shape.rank, 0);
    EXPECT_TRUE(file.find("a\u00e9\n\U0001F600/"));
    EXPECT_EQ(file.find("empty")->num_bytes(), 0U);
    EXPECT_EQ(file.find("nibbles")->num_bytes(), 3U);
    EXPECT_FALSE(file.find("absent"));
}

TEST(Safetensors, EveryDtypeSurvivesTheRoundTrip) {
    const TemporaryFolder folder;
    std::vector<std::string> storage;
    std::vector<NamedTensor> tensors;
    for (int i = 0; i <= static_cast<int>(DType::u64); ++i) {
        const auto dtype = static_cast<DType>(i);
        storage.emplace_back(static_cast<std::size_t>(8 * 3 * dtype_bits(dtype) / 8),
                             static_cast<char>('a' + i));
    }
    for (int i = 0; i <= static_cast<int>(DType::u64); ++i) {
        const auto dtype = static_cast<DType>(i);
        tensors.push_back({std::string("quote\"\\\t") + std::string(dtype_name(dtype)),
                           {storage[static_cast<std::size_t>(i)].data(), dtype, {8, 3}, {}}});
    }
    write_safetensors(folder / "all.safetensors", tensors);
    const auto file = SafetensorsFile::open(folder / "all.safetensors");
    ASSERT_EQ(file.entries().size(), tensors.size());
    for (const NamedTensor& expected : tensors) {
        const auto found = file.find(expected.name);
        ASSERT_TRUE(found) << expected.name;
        EXPECT_EQ(found->dtype, expected.tensor.dtype);
        EXPECT_EQ(found->shape, expected.tensor.shape);
        EXPECT_EQ(std::memcmp(found->data, expected.tensor.data, found->num_bytes()), 0);
    }
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1)
        << "no partial file is left";
}

TEST(Safetensors, AnEmptyFileIsLegal) {
    const TemporaryFolder folder;
    write_safetensors(folder / "none.safetensors", {});
    EXPECT_TRUE(SafetensorsFile::open(folder / "none.safetensors").entries().empty());
}

TEST(SafetensorsWriter, LeavesNothingBehindUnlessFinished) {
    const TemporaryFolder folder;
    const std::vector<TensorSpec> specs = {{"a", DType::u8, {4}}};
    {
        SafetensorsWriter writer(folder / "half.safetensors", specs);
        writer.append("xx", 2);
        EXPECT_THROW(writer.finish(), Error) << "two bytes are missing";
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    {
        SafetensorsWriter writer(folder / "half.safetensors", specs);
        EXPECT_THROW(writer.append("xxxxx", 5), Error) << "one byte too many";
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SafetensorsWriter, ReplacesTheFileOnlyWhenFinished) {
    const TemporaryFolder folder;
    const auto path = folder.write("x.safetensors", "old");
    const std::vector<TensorSpec> specs = {{"a", DType::u8, {4}}};
    SafetensorsWriter writer(path, specs);
    writer.append("ab", 2);
    writer.append("cd", 2);
    EXPECT_EQ(test::read_file(path), "old");
    writer.finish();
    EXPECT_EQ(std::memcmp(SafetensorsFile::open(path).find("a")->data, "abcd", 4), 0);
}

TEST(SafetensorsWriter, SaysWhichPlaceCannotBeWritten) {
    const TemporaryFolder folder;
    for (const auto& path : {folder / "no/such/folder.safetensors", folder.path()}) {
        try {
            write_safetensors(path, {});
            ADD_FAILURE() << "wrote " << path;
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::machine);
            EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos) << error.what();
        }
    }
}

TEST(SafetensorsWriter, AFullDiskLeavesNoFile) {
    if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
    const TemporaryFolder folder;
    std::filesystem::create_symlink(
        "/dev/full", (folder / "full.safetensors").string() + ".partial-" + std::to_string(getpid()));
    const std::string data(100'000, 'x');
    const std::vector<NamedTensor> tensors = {{"a", {data.data(), DType::u8, {100'000}, {}}}};
    EXPECT_THROW(write_safetensors(folder / "full.safetensors", tensors), Error);
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

/// Opening must neither crash nor throw anything but broken_file.
bool opens(const TemporaryFolder& folder, const std::string& bytes) {
    try {
        SafetensorsFile::open(folder.write("some.safetensors", bytes));
        return true;
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::broken_file) << error.what();
        return false;
    }
}

TEST(Safetensors, EveryTruncationIsRefused) {
    const TemporaryFolder folder;
    const std::string whole = file_of(kTwo, kTwoData);
    EXPECT_TRUE(opens(folder, whole));
    for (std::size_t size = 0; size < whole.size(); ++size) {
        EXPECT_FALSE(opens(folder, whole.substr(0, size))) << size << " bytes";
    }
}

TEST(Safetensors, NoDamagedByteCrashesTheReader) {
    const TemporaryFolder folder;
    const std::string whole = file_of(kTwo, kTwoData);
    int num_refused = 0;
    for (std::size_t at = 0; at < whole.size() - kTwoData.size(); ++at) {
        for (const int flip : {0x01, 0x04, 0x20, 0x80, 0xFF}) {
            std::string damaged = whole;
            damaged[at] = static_cast<char>(damaged[at] ^ flip);
            num_refused += opens(folder, damaged) ? 0 : 1;
        }
    }
    EXPECT_GT(num_refused, 300) << "only names can change without being noticed";
}

TEST(Safetensors, MembersBeyondTheFormatAreSkipped) {
    const TemporaryFolder folder;
    const auto path = folder.write(
        "more.safetensors",
        file_of(R"({"w":{"stride":[1,{"a":-1.5e3}],"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                "abcd"));
    EXPECT_EQ(SafetensorsFile::open(path).find("w")->shape, Shape({4}));
}

TEST(Safetensors, MessagesStayShortAndPrintable) {
    const std::string message = refusal(
        file_of("{" + entry(std::string(1'000'000, 'n') + "\\u001b[2J", "U9", "[]", 0, 1) + "}", "x"));
    EXPECT_LT(message.size(), 500U);
    EXPECT_EQ(message.find('\x1b'), std::string::npos);
}

TEST(Safetensors, APipeIsNoFile) {
    const TemporaryFolder folder;
    const auto pipe = folder / "pipe.safetensors";
    ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
    EXPECT_THROW(SafetensorsFile::open(pipe), Error);
    EXPECT_THROW(write_safetensors(pipe, {}), Error);
    EXPECT_TRUE(std::filesystem::is_fifo(pipe)) << "was replaced";
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsInstrumented = true;  // which takes several times the time and memory
#else
constexpr bool kIsInstrumented = false;
#endif

TEST(Safetensors, AHundredMegabytesOfLies) {
    const TemporaryFolder folder;
    std::string header = "{";
    header.reserve(100'000'000);
    for (std::uint64_t i = 0; header.size() < 99'999'800; ++i) {
        if (i > 0) header += ",";
        header += entry(std::to_string(i * 7919 % 2'000'003), "U8", "[0]", 0, 0);
    }
    // A name twice is noticed last of all.
    const auto path =
        folder.write("lies.safetensors", file_of(header + "," + entry("0", "U8", "[0]", 0, 0) + "}", ""));
    std::string().swap(header);

    // In a process of its own, since a process's peak never falls.
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        try {
            SafetensorsFile::open(path);
        } catch (const Error& error) {
            const bool is_right = error.kind() == ErrorKind::broken_file &&
                                  std::string(error.what()).find("\"0\" stands twice") != std::string::npos;
            _exit(is_right ? 0 : 2);
        }
        _exit(1);
    }
    int status = 0;
    rusage used{};
    ASSERT_EQ(wait4(child, &status, 0, &used), child);
    EXPECT_EQ(status, 0);
    if (kIsInstrumented) return;
    const auto seconds = [](const timeval& t) {
        return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    EXPECT_LT(seconds(used.ru_utime) + seconds(used.ru_stime), 1.0);
    EXPECT_LT(used.ru_maxrss, 200 * 1024) << "KB";
}

TEST(Safetensors, ThreeHundredThousandEntries) {
    const TemporaryFolder folder;
    constexpr std::uint64_t kCount = 300'000;
    std::string header = "{";
    for (std::uint64_t i = 0; i < kCount; ++i) {
        if (i > 0) header += ",";
        const std::uint64_t scrambled = i * 7919 % kCount;  // not in order of the names
        header += entry("model.layers." + std::to_string(scrambled) + ".weight", "U8", "[1]", i, i + 1);
    }
    const auto path = folder.write("many.safetensors", file_of(header + "}", std::string(kCount, 'x')));
    const auto start = std::chrono::steady_clock::now();
    const auto file = SafetensorsFile::open(path);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("300000 entries, %.1f MB of header: %.3f s\n", static_cast<double>(header.size()) * 1e-6,
                seconds);
    EXPECT_EQ(file.entries().size(), kCount);
    EXPECT_TRUE(file.find("model.layers.299999.weight"));
}

}  // namespace
}  // namespace moe4
