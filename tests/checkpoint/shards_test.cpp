// Shards and their index: the union, who wins, what is a warning and what an error.
#include "checkpoint/shards.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "moe4/error.hpp"
#include "moe4/safetensors.hpp"
#include "temporary_folder.hpp"

namespace moe4::checkpoint {
namespace {

class Shards : public testing::Test {
protected:
    /// Every tensor is U8 [1] holding `byte`.
    void shard(const std::string& file, const std::map<std::string, char>& tensors) {
        std::vector<NamedTensor> named;
        for (const auto& [name, byte] : tensors) named.push_back({name, {&byte, DType::u8, {1}, {}}});
        write_safetensors(folder_ / file, named);
    }
    void index(const std::map<std::string, std::string>& weight_map) {
        std::string json;
        for (const auto& [name, file] : weight_map)
            json += (json.empty() ? "\"" : ",\"") + name + "\":\"" + file + "\"";
        folder_.write(
            "model.safetensors.index.json",
            "{\"metadata\":{\"total_size\":1.5e3,\"x\":[1,{\"y\":null}]},\"weight_map\":{" + json + "}}");
    }
    char byte(const std::string& name) const {
        const ShardEntry* entry = tensors_->find(name);
        return entry == nullptr ? '?' : *static_cast<const char*>(entry->tensor.data);
    }
    void open() { tensors_ = ShardedTensors::open(folder_.path()); }
    void expect_refusal(ErrorKind kind, const std::string& says) {
        try {
            open();
            ADD_FAILURE() << "opened, expected: " << says;
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), kind) << error.what();
            EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
        }
    }

    test::TemporaryFolder folder_;
    std::shared_ptr<const ShardedTensors> tensors_;
};

TEST_F(Shards, WithoutAnIndexAllFilesAreOneSet) {
    shard("b.safetensors", {{"y", '2'}});
    shard("a.safetensors", {{"x", '1'}, {"z", '3'}});
    open();
    ASSERT_EQ(tensors_->entries().size(), 3U);
    EXPECT_EQ(tensors_->entries()[1].name, "y");
    EXPECT_EQ(byte("x"), '1');
    EXPECT_EQ(byte("y"), '2');
    EXPECT_EQ(tensors_->num_bytes(), 3U);
    EXPECT_EQ(tensors_->find("w"), nullptr);
}

TEST_F(Shards, HiddenFilesAreNoShards) {  // "._a.safetensors" beside it is how macOS keeps attributes
    shard("a.safetensors", {{"x", '1'}});
    folder_.write("._a.safetensors", "Mac OS X");
    open();
    EXPECT_EQ(tensors_->entries().size(), 1U);
}

TEST_F(Shards, WhatIsNoFileIsABrokenShard) {
    for (const bool has_index : {false, true}) {
        if (has_index) index({{"x", "a.safetensors"}});
        const std::string path = (folder_ / "a.safetensors").string();
        std::filesystem::create_directory(path);
        expect_refusal(ErrorKind::broken_file, path + ": is a folder, expected a file");
        std::filesystem::remove(path);
        ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
        expect_refusal(ErrorKind::broken_file, path + ": is not a regular file");
        std::filesystem::remove(path);
        std::filesystem::create_symlink("nowhere", path);
        if (has_index) {  // as a shard that is absent: it matters to those who need it
            open();
            EXPECT_EQ(tensors_->missing().size(), 1U);
        } else {
            expect_refusal(ErrorKind::broken_file, path);
        }
        std::filesystem::remove(path);
    }
}

TEST_F(Shards, PointersOfGitLfsAreNamed) {
    const char* const pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n";
    for (const char* name : {"a.safetensors", "model.safetensors.index.json"}) {
        folder_.write(name, pointer);
        expect_refusal(ErrorKind::broken_file, (folder_ / name).string() + ": is a Git LFS pointer");
    }
}

TEST_F(Shards, AFileIsNoFolder) {
    const auto path = folder_.write("model.safetensors", "");
    try {
        ShardedTensors::open(path);
        ADD_FAILURE() << "opened";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
        EXPECT_EQ(error.what(), path.string() + ": is a file, expected a folder");
    }
}

TEST_F(Shards, WithoutAnIndexANameInTwoFilesIsAnError) {
    shard("a.safetensors", {{"x", '1'}});
    shard("b.safetensors", {{"x", '2'}});
    expect_refusal(ErrorKind::broken_file, "tensor \"x\" is also in");
}

TEST_F(Shards, TheIndexWinsOnDuplicates) {
    shard("a.safetensors", {{"x", '1'}});
    shard("b.safetensors", {{"x", '2'}, {"y", '3'}});
    index({{"x", "b.safetensors"}, {"y", "b.safetensors"}, {"a", "a.safetensors"}});
    expect_refusal(ErrorKind::broken_file, "\"a\" is promised in \"a.safetensors\"");
    shard("a.safetensors", {{"x", '1'}, {"a", '0'}});
    open();
    EXPECT_EQ(byte("x"), '2');
    EXPECT_TRUE(tensors_->warnings().empty());
}

TEST_F(Shards, TensorsThatTheIndexForgotAreThere) {
    shard("a.safetensors", {{"x", '1'}, {"x_scale", '7'}});
    index({{"x", "a.safetensors"}});
    open();
    EXPECT_EQ(byte("x_scale"), '7');
    EXPECT_TRUE(tensors_->warnings().empty());
}

TEST_F(Shards, AnEntryInAnotherShardIsAWarning) {
    shard("a.safetensors", {{"x", '1'}});
    shard("b.safetensors", {{"y", '2'}});
    index({{"x", "b.safetensors"}, {"y", "b.safetensors"}, {"z", "a.safetensors"}});
    expect_refusal(ErrorKind::broken_file, "\"z\" is promised in \"a.safetensors\", which does not hold it");
    index({{"x", "b.safetensors"}, {"y", "b.safetensors"}, {"x2", "c.safetensors"}});
    shard("c.safetensors", {{"x2", '4'}});
    // a.safetensors is not named by this index, so x is nowhere.
    expect_refusal(ErrorKind::broken_file, "\"x\" is promised in \"b.safetensors\"");
    shard("c.safetensors", {{"x2", '4'}, {"x", '5'}});
    open();
    EXPECT_EQ(byte("x"), '5');
    ASSERT_EQ(tensors_->warnings().size(), 1U);
    EXPECT_NE(tensors_->warnings()[0].find("tensor \"x\" is promised in \"b.safetensors\", but lies in"),
              std::string::npos);
}

TEST_F(Shards, AnEntryInTwoOtherShardsIsAnError) {
    shard("a.safetensors", {{"p", '0'}, {"x", '1'}});
    shard("b.safetensors", {{"q", '0'}, {"x", '2'}});
    shard("c.safetensors", {{"y", '3'}});
    index({{"x", "c.safetensors"}, {"y", "c.safetensors"}, {"p", "a.safetensors"}, {"q", "b.safetensors"}});
    expect_refusal(ErrorKind::broken_file, "tensor \"x\" is promised in \"c.safetensors\", but lies in");
}

TEST_F(Shards, AnAbsentShardIsNoErrorYet) {
    shard("a.safetensors", {{"x", '1'}});
    index({{"x", "a.safetensors"}, {"y", "gone.safetensors"}});
    open();
    EXPECT_EQ(tensors_->find("y"), nullptr);
    ASSERT_NE(tensors_->find_missing("y"), nullptr);
    EXPECT_EQ(tensors_->find_missing("y")->shard_file, "gone.safetensors");
    EXPECT_EQ(tensors_->find_missing("x"), nullptr);
}

TEST_F(Shards, AnAbsentShardsTensorInAnotherShardIsAWarning) {
    shard("a.safetensors", {{"x", '1'}, {"y", '2'}});
    index({{"x", "a.safetensors"}, {"y", "gone.safetensors"}});
    open();
    EXPECT_EQ(byte("y"), '2');
    EXPECT_TRUE(tensors_->missing().empty());
    ASSERT_EQ(tensors_->warnings().size(), 1U);
}

TEST_F(Shards, ManyWarningsBecomeOne) {
    std::map<std::string, char> tensors;
    std::map<std::string, std::string> weight_map = {{"z", "b.safetensors"}, {"first", "a.safetensors"}};
    for (int i = 0; i < 100; ++i) {
        const std::string name = "t" + std::to_string(i);
        tensors[name] = 'x';
        weight_map[name] = "b.safetensors";
    }
    tensors["first"] = 'x';
    shard("a.safetensors", tensors);
    shard("b.safetensors", {{"z", '1'}});
    index(weight_map);
    open();
    ASSERT_EQ(tensors_->warnings().size(), 17U);
    EXPECT_NE(tensors_->warnings().back().find("84 more tensors"), std::string::npos);
    EXPECT_EQ(tensors_->entries().size(), 102U);
}

TEST_F(Shards, TheConsolidatedIndexIsAnIndex) {
    shard("consolidated-1.safetensors", {{"x", '1'}});
    folder_.write("consolidated.safetensors.index.json",
                  R"({"weight_map":{"x":"consolidated-1.safetensors","y":"consolidated-2.safetensors"}})");
    open();
    EXPECT_EQ(byte("x"), '1');
    EXPECT_NE(tensors_->find_missing("y"), nullptr);
}

TEST_F(Shards, AFileNameThatNoFileCanHaveIsAbsent) {
    shard("a.safetensors", {{"x", '1'}});
    index({{"x", "a.safetensors"}, {"y", std::string(5000, 'n')}});
    open();
    EXPECT_NE(tensors_->find_missing("y"), nullptr);
}

TEST_F(Shards, SixtyShardsWithManyNames) {
    std::map<std::string, std::string> weight_map;
    for (int s = 0; s < 60; ++s) {
        const std::string file = "model-" + std::to_string(s) + ".safetensors";
        std::map<std::string, char> tensors;
        for (int i = 0; i < 200; ++i) {
            const std::string name =
                "model.layers." + std::to_string(i) + ".mlp.experts." + std::to_string(s);
            tensors[name] = static_cast<char>(s);
            weight_map[name] = file;
        }
        shard(file, tensors);
    }
    index(weight_map);
    open();
    ASSERT_EQ(tensors_->entries().size(), weight_map.size());
    for (const ShardEntry& entry : tensors_->entries()) {
        const std::string name(entry.name);
        EXPECT_EQ((folder_ / weight_map.at(name)).string(), tensors_->shard_path(entry));
        EXPECT_EQ(std::to_string(byte(name)), name.substr(name.rfind('.') + 1));
    }
    EXPECT_TRUE(std::is_sorted(tensors_->entries().begin(), tensors_->entries().end(),
                               [](const auto& a, const auto& b) { return a.name < b.name; }));
    EXPECT_TRUE(tensors_->warnings().empty());
}

TEST_F(Shards, TheIndexStaysInItsFolder) {
    shard("a.safetensors", {{"x", '1'}});
    for (const char* file : {"../a.safetensors", "/etc/passwd", "", "..", "sub/a.safetensors"}) {
        index({{"x", file}});
        expect_refusal(ErrorKind::broken_file, "expected the name of a file in the same folder");
    }
}

TEST_F(Shards, BrokenIndexes) {
    shard("a.safetensors", {{"x", '1'}});
    const std::pair<const char*, const char*> cases[] = {
        {"", "ends early"},
        {"{}", "has no weight_map"},
        {"{\"weight_map\":{\"x\":\"a.safetensors\",\"x\":\"a.safetensors\"}}", "\"x\" stands twice"},
        {"{\"weight_map\":{},\"weight_map\":{}}", "two weight_maps"},
        {"{\"weight_map\":[]}", "expected '{'"},
        {"{\"weight_map\":{\"x\":1}}", "expected '\"'"},
        {"{\"metadata\":tru,\"weight_map\":{}}", "expected a value"},
    };
    for (const auto& [json, says] : cases) {
        folder_.write("model.safetensors.index.json", json);
        expect_refusal(ErrorKind::broken_file, says);
    }
    folder_.write("model.safetensors.index.json", "{\"metadata\":" + std::string(100'000, '[') + "}");
    expect_refusal(ErrorKind::broken_file, "more than 64 levels");
}

TEST_F(Shards, ABrokenShardIsNamed) {
    folder_.write("a.safetensors", "not a tensor in sight");
    expect_refusal(ErrorKind::broken_file, "a.safetensors: is not a safetensors file");
}

TEST_F(Shards, EmptyAndAbsentFolders) {
    expect_refusal(ErrorKind::broken_file, "holds no *.safetensors file");
    EXPECT_THROW(ShardedTensors::open(folder_ / "absent"), Error);
}

}  // namespace
}  // namespace moe4::checkpoint
