// moe4 dequantize: a layer's matrices as the quantising tools' own code would expand them, one in memory at a
// time.
#include <fmt/format.h>

#include <algorithm>

#include "arguments.hpp"
#include "command.hpp"
#include "engine_options.hpp"
#include "moe4/error.hpp"
#include "output.hpp"
#include "output_file.hpp"
#include "progress.hpp"

namespace moe4::cli {

namespace {

struct Options {
    std::string folder;
    int layer = 0;
    int expert = -1;  // all of them
    std::string output;
    std::string dtype = "f32";
    bool is_json = false;
};

ExpertRange chosen_experts(const Options& options, int num_experts) {
    if (options.expert < 0) return {.first = 0, .count = num_experts};
    if (options.expert < num_experts) return {.first = options.expert, .count = 1};
    throw Error(ErrorKind::invalid_argument, fmt::format("--expert is {}, but layer {} has experts 0 to {}",
                                                         options.expert, options.layer, num_experts - 1));
}

std::vector<TensorSpec> tensors_of(const MoeWeights& weights, const ExpertRange& experts, DType dtype) {
    std::vector<TensorSpec> tensors;
    for (int e = experts.first; e < experts.first + experts.count; ++e) {
        for (const Projection projection : kProjections) {
            const Nvfp4View& matrix = weights.experts[static_cast<std::size_t>(e)][projection].weight;
            tensors.push_back({fmt::format("experts.{}.{}_proj.weight", e, name_of(projection)),
                               dtype,
                               {matrix.rows, matrix.cols}});
        }
    }
    return tensors;
}

class MatrixWriter {
public:
    MatrixWriter(OutputFile& file, DType dtype) : file_(file), dtype_(dtype) {}

    void append(const Nvfp4View& matrix) {
        f32_.resize(static_cast<std::size_t>(matrix.rows * matrix.cols));
        dequantize(matrix, f32_.data());
        if (dtype_ == DType::f32) {
            file_.append(f32_.data(), f32_.size() * sizeof(float));
            return;
        }
        bf16_.resize(f32_.size());
        std::transform(f32_.begin(), f32_.end(), bf16_.begin(), round_to_bf16);
        file_.append(bf16_.data(), bf16_.size() * sizeof(std::uint16_t));
    }

private:
    OutputFile& file_;
    DType dtype_;
    std::vector<float> f32_;
    std::vector<std::uint16_t> bf16_;
};

/// Weights that w4a16 refuses cannot mean anything. (Input scales play no part in either.)
void refuse_meaningless_scales(const LayerInfo& info) {
    if (std::find(info.modes.begin(), info.modes.end(), Precision::w4a16) != info.modes.end()) return;
    throw Error(ErrorKind::broken_file, info.refusals.front());
}

int dequantize_layer(const Options& options) {
    Progress progress("opening " + options.folder);
    refuse_to_overwrite(options.output, options.folder);
    const Checkpoint checkpoint = Checkpoint::open(options.folder);
    const MoeWeights weights = checkpoint.moe_layer(options.layer);
    refuse_meaningless_scales(checkpoint.inspect_layer(options.layer, Checkpoint::Scan::block_scales));
    const ExpertRange experts = chosen_experts(options, weights.config.num_experts);
    const DType dtype = options.dtype == "bf16" ? DType::bf16 : DType::f32;
    const std::vector<TensorSpec> tensors = tensors_of(weights, experts, dtype);

    progress.begin(fmt::format("dequantising layer {}, experts", options.layer));
    OutputFile file(options.output, tensors);
    MatrixWriter writer(file, dtype);
    for (int i = 0; i < experts.count; ++i) {
        const ExpertWeights& expert = weights.experts[static_cast<std::size_t>(experts.first + i)];
        for (const Projection projection : kProjections) writer.append(expert[projection].weight);
        progress.update(i + 1, experts.count);
    }
    file.finish();
    progress.end();

    if (options.is_json) {
        print_json(Json{{"layer", options.layer},
                        {"output", options.output},
                        {"dtype", options.dtype},
                        {"matrices", tensors.size()}});
    } else {
        print(fmt::format("{}: {} matrices in {}\n", options.output, tensors.size(), dtype_name(dtype)));
    }
    return kOk;
}

}  // namespace

void add_dequantize(CLI::App& app, Action& action) {
    CLI::App* command =
        app.add_subcommand("dequantize", "write a layer's matrices as the quantising tool would expand them");
    const auto options = std::make_shared<Options>();
    add_layer_options(*command, options->folder, options->layer);
    command->add_option("--expert", options->expert, "this expert alone (default: all)")->check(number_in(0));
    command
        ->add_option("--output", options->output,
                     "safetensors to write: experts.E.{gate,up,down}_proj.weight [rows,cols]\n"
                     "Appears when it is complete, in the place of a file or a link of that name")
        ->required();
    command
        ->add_option("--dtype", options->dtype, "f32: the tool's bits; bf16: those, rounded to nearest even")
        ->check(one_of({"f32", "bf16"}))
        ->capture_default_str();
    add_json_option(*command, options->is_json);
    command->footer("\nExample: moe4 dequantize DIR --layer 3 --expert 17 --output w.safetensors");
    command->callback([&action, options] { action = [options] { return dequantize_layer(*options); }; });
}

}  // namespace moe4::cli
