#include "bench_report.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>

#include "moe4/error.hpp"

namespace moe4::cli {

namespace {

constexpr double kWidth = 900;
constexpr double kHeight = 520;
constexpr double kMargin = 60;
const char* const kColours[] = {"#3b7dd8", "#d8783b", "#3ba55c", "#a83bd8", "#c0a020", "#d83b5c"};

std::vector<double> decades(double low, double high) {
    std::vector<double> values{low};
    while (values.back() * 10 <= high * 1.01) values.push_back(values.back() * 10);
    return values;
}

std::string escaped(std::string_view text) {
    std::string out;
    for (const char c : text) {
        c == '<' ? out += "&lt;" : c == '&' ? out += "&amp;" : out += c;
    }
    return out;
}

/// Logarithmic axes around all points and limits.
class Axes {
public:
    explicit Axes(const BenchReport& report) {
        for (const BenchRow& row : report.rows) {
            include(row.operations_per_byte, row.gop_per_s);
            include(row.operations_per_byte, row.gop_per_s / std::max(row.ratio, 1e-3));
        }
        for (const MachineLimit& limit : report.limits) {
            if (limit.name != "dram_read") include(x_high_, limit.value);
        }
        x_low_ = std::pow(10, std::floor(std::log10(x_low_)));
        y_low_ = std::pow(10, std::floor(std::log10(y_low_)));
        x_high_ = std::pow(10, std::ceil(std::log10(x_high_)));
        y_high_ = std::pow(10, std::ceil(std::log10(y_high_)));
    }

    double x(double value) const {
        return kMargin + position(value, x_low_, x_high_) * (kWidth - 2 * kMargin);
    }
    double y(double value) const {
        return kHeight - kMargin - position(value, y_low_, y_high_) * (kHeight - 2 * kMargin);
    }
    double x_low() const { return x_low_; }
    double x_high() const { return x_high_; }

    std::string grid() const {
        std::string svg;
        for (const double v : decades(x_low_, x_high_)) {
            svg += fmt::format("<line class='grid' x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2}'/>", x(v),
                               kMargin, kHeight - kMargin);
            svg += fmt::format("<text x='{:.1f}' y='{}' text-anchor='middle'>{:g}</text>", x(v), kHeight - 40,
                               v);
        }
        for (const double v : decades(y_low_, y_high_)) {
            svg += fmt::format("<line class='grid' y1='{0:.1f}' y2='{0:.1f}' x1='{1}' x2='{2}'/>", y(v),
                               kMargin, kWidth - kMargin);
            svg += fmt::format("<text x='{}' y='{:.1f}' text-anchor='end'>{:g}</text>", kMargin - 6, y(v) + 4,
                               v);
        }
        return svg + fmt::format(
                         "<text x='{}' y='{}' text-anchor='middle'>operations per byte of packed weights"
                         "</text><text x='{}' y='30'>GOP/s</text>",
                         kWidth / 2, kHeight - 15, kMargin);
    }

private:
    static double position(double value, double low, double high) {
        return std::log(std::clamp(value, low, high) / low) / std::log(high / low);
    }
    void include(double x, double y) {
        x_low_ = std::min(x_low_, x);
        x_high_ = std::max(x_high_, x);
        y_low_ = std::min(y_low_, y);
        y_high_ = std::max(y_high_, y);
    }
    double x_low_ = 3, x_high_ = 30, y_low_ = 10, y_high_ = 100;
};

std::string limit_lines(const BenchReport& report, const Axes& axes) {
    std::string svg;
    for (const MachineLimit& limit : report.limits) {
        const bool is_memory = limit.name == "dram_read";
        const double left = is_memory ? axes.x_low() * limit.value : limit.value;
        const double right = is_memory ? axes.x_high() * limit.value : limit.value;
        svg += fmt::format("<line class='limit' x1='{:.1f}' y1='{:.1f}' x2='{:.1f}' y2='{:.1f}'/>",
                           axes.x(axes.x_low()), axes.y(left), axes.x(axes.x_high()), axes.y(right));
        svg += fmt::format("<text class='limit' x='{:.1f}' y='{:.1f}'>{} {:.0f}</text>",
                           is_memory ? axes.x(axes.x_low()) + 6 : kWidth - kMargin - 170, axes.y(left) - 5,
                           escaped(limit.name), limit.value);
    }
    return svg;
}

std::string points(const BenchReport& report, const Axes& axes) {
    std::map<std::string, const char*> colours;
    std::string svg;
    for (const BenchRow& row : report.rows) {
        const std::string series = row.shape + " " + row.mode + " " + row.routing;
        const auto [entry, is_new] = colours.emplace(series, kColours[colours.size() % std::size(kColours)]);
        if (is_new) {
            svg += fmt::format("<text x='{}' y='{}' fill='{}'>{}</text>", kMargin + 10,
                               kMargin + 16.0 * static_cast<double>(colours.size()), entry->second,
                               escaped(series));
        }
        svg += fmt::format(
            "<circle cx='{:.1f}' cy='{:.1f}' r='5' fill='{}'><title>{}, {} tokens, {}: {:.1f} us, {:.0f} % "
            "of {}</title>"
            "</circle>",
            axes.x(row.operations_per_byte), axes.y(row.gop_per_s), entry->second, escaped(series),
            row.tokens, escaped(row.kernel), row.us, row.ratio * 100, escaped(row.limit));
    }
    return svg;
}

std::string table(const BenchReport& report) {
    std::string html =
        "<table><tr><th>shape<th>mode<th>routing<th>tokens<th>kernel<th>us<th>GB/s<th>GOP/"
        "s<th>limit<th>ratio</tr>\n";
    for (const BenchRow& row : report.rows) {
        html += fmt::format(
            "<tr><td>{}<td>{}<td>{}<td>{}<td>{}<td>{:.1f}<td>{:.1f}<td>{:.1f}<td>{}<td>{:.2f}</tr>\n",
            escaped(row.shape), row.mode, row.routing, row.tokens, escaped(row.kernel), row.us, row.gb_per_s,
            row.gop_per_s, escaped(row.limit), row.ratio);
    }
    return html + "</table>";
}

[[noreturn]] void refuse(const std::filesystem::path& path) {
    throw Error(ErrorKind::machine, path.string() + ": cannot be written");
}

/// A file beside `path` that holds `text`.
std::filesystem::path write_partial(const std::filesystem::path& path, std::string_view text) {
    const std::filesystem::path partial = path.string() + ".partial-" + std::to_string(getpid());
    std::ofstream file(partial, std::ios::binary);
    file << text;
    file.close();
    if (file) return partial;
    std::error_code ignored;
    std::filesystem::remove(partial, ignored);
    refuse(path);
}

}  // namespace

std::string text_of(const BenchReport& report) {
    const bool is_gpu = report.threads == 0;
    const std::string unit = is_gpu ? "TFLOP/s" : "GOP/s";
    const double gops = is_gpu ? 1000 : 1;
    std::string text = report.machine + "\n";
    for (const MachineLimit& limit : report.limits) {
        const bool is_memory = limit.name == "dram_read";
        text += fmt::format("  {:<14} {:9.1f} {}\n", limit.name, limit.value / (is_memory ? 1 : gops),
                            is_memory ? "GB/s" : unit);
    }
    Table table({"shape", "mode", "routing", "tokens", "kernel", "us", "GB/s", unit, "limit", "ratio"});
    for (const BenchRow& row : report.rows) {
        table.add_row({row.shape, row.mode, row.routing, std::to_string(row.tokens), row.kernel,
                       fmt::format("{:.1f}", row.us), fmt::format("{:.1f}", row.gb_per_s),
                       fmt::format("{:.1f}", row.gop_per_s / gops), row.limit,
                       fmt::format("{:.2f}", row.ratio)});
    }
    return text + table.to_string();
}

Json json_of(const BenchReport& report) {
    Json document{{"machine", report.machine}, {"limits", Json::object()}, {"rows", Json::array()}};
    for (const MachineLimit& limit : report.limits) document["limits"][std::string(limit.name)] = limit.value;
    for (const BenchRow& row : report.rows) {
        document["rows"].push_back({{"shape", row.shape},
                                    {"mode", row.mode},
                                    {"routing", row.routing},
                                    {"tokens", row.tokens},
                                    {"threads", report.threads},
                                    {"kernel", row.kernel},
                                    {"us", row.us},
                                    {"gb_per_s", row.gb_per_s},
                                    {"gop_per_s", row.gop_per_s},
                                    {"limit", row.limit},
                                    {"limit_value", row.limit_value},
                                    {"ratio", row.ratio}});
    }
    return document;
}

void refuse_unwritable(const std::filesystem::path& path) {
    if (std::filesystem::is_directory(path)) refuse(path);
    std::filesystem::remove(write_partial(path, ""));
}

void write_html(const BenchReport& report, const std::filesystem::path& path) {
    const Axes axes(report);
    const std::string html = fmt::format(
        "<!doctype html><meta charset='utf-8'><title>moe4 bench</title>\n<style>body{{font:14px "
        "system-ui,sans-serif;"
        "max-width:60em;margin:2em "
        "auto;color:#222;background:#fff}}table{{border-collapse:collapse}}th,td{{padding:.2em "
        ".7em;text-align:right;border-bottom:1px solid #8884}}svg text{{font-size:12px}}svg "
        "text:not([fill]){{fill:currentColor}}.grid{{stroke:"
        "#8884}}line.limit{{stroke:#888;stroke-dasharray:5 "
        "3}}@media(prefers-color-scheme:dark){{body{{color:#ddd;"
        "background:#181818}}}}</style>\n<h1>moe4 bench</h1><p>{}</p>\n<svg viewBox='0 0 {} "
        "{}'>{}{}{}</svg>\n{}\n",
        escaped(report.machine), kWidth, kHeight, axes.grid(), limit_lines(report, axes),
        points(report, axes), table(report));
    const std::filesystem::path partial = write_partial(path, html);
    std::error_code error;
    std::filesystem::rename(partial, path, error);
    if (!error) return;
    std::filesystem::remove(partial, error);
    refuse(path);
}

}  // namespace moe4::cli
