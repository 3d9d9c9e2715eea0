#include "adapters.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "numbers.h"

namespace headrace {

const char* const kSiteNames[kSites] = {"qkv", "o", "up", "down"};

Adapter::Adapter(const Model& model, bool exact)
    : model_(&model), exact_(exact), held_(model.weights().layers.size() * kSites) {}

const Product* Adapter::product_at(int64_t layer, Site site) const {
  const std::vector<Layer>& layers = model_->weights().layers;
  if (layer < 0 || layer >= static_cast<int64_t>(layers.size())) return nullptr;
  const Layer& of = layers[static_cast<size_t>(layer)];
  const Product* product = nullptr;
  switch (site) {
    case Site::kQkv:
      product = &of.qkv;
      break;
    case Site::kOutput:
      product = &of.o;
      break;
    case Site::kUp:
      product = &of.mlp.up;
      break;
    case Site::kDown:
      product = &of.mlp.down;
      break;
  }
  return product->present() ? product : nullptr;
}

// Lane i of a vector of pairs has values i and 16 + i of the run.
void Adapter::store(uint8_t* out, int64_t at, float value) const {
  if (exact_) {
    std::memcpy(out + at * 4, &value, 4);
    return;
  }
  const uint16_t rounded = bf16_from_f32(value);
  std::memcpy(out + at / 32 * 64 + at % 16 * 4 + at % 32 / 16 * 2, &rounded, 2);
}

void Adapter::add(int64_t layer, Site site, int64_t inputs, const float* down, const std::vector<LowRankPart>& parts,
                  const float* magnitudes) {
  const Product* product = product_at(layer, site);
  const std::string name =
      "product '" + std::string(kSiteNames[static_cast<int>(site)]) + "' of layer " + std::to_string(layer);
  if (product == nullptr) throw std::invalid_argument("the model has no " + name);
  const Layout& layout = product->weights.layout;
  if (inputs != layout.inputs) {
    throw std::invalid_argument(name + " has " + std::to_string(layout.inputs) + " inputs, not " +
                                std::to_string(inputs));
  }
  int64_t ranks = 0;
  for (const LowRankPart& part : parts) {
    if (part.ranks < 1) throw std::invalid_argument("a part of " + name + " has no ranks");
    ranks += part.ranks;
    for (int64_t i = 0; i < part.outputs; ++i) {
      if (part.columns[i] < 0 || part.columns[i] >= layout.outputs) {
        throw std::invalid_argument(name + " has no output " + std::to_string(part.columns[i]));
      }
    }
  }
  if (ranks > kMostRanks) throw std::invalid_argument(name + " would have " + std::to_string(ranks) + " ranks");
  Held& held = held_[static_cast<size_t>(layer) * kSites + static_cast<size_t>(site)];
  if (held.view.down != nullptr) throw std::invalid_argument(name + " is changed twice");

  const int64_t size = exact_ ? 4 : 2;
  const int64_t width = round_up(inputs, 32);
  const int64_t padded_ranks = round_up(ranks, kRanksAtOnce);
  held.down = Buffer<uint8_t>(std::max<int64_t>(1, padded_ranks) * width * size);
  for (int64_t r = 0; r < ranks; ++r) {
    for (int64_t i = 0; i < inputs; ++i) store(held.down.data() + r * width * size, i, down[r * inputs + i]);
  }

  // A part's columns by panels, in the order of the panels.
  struct Placed {
    int64_t panel, part, first_rank;
  };
  std::vector<Placed> placed;
  int64_t first_rank = 0;
  int64_t floats = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    std::vector<bool> touched(static_cast<size_t>(layout.panels));
    for (int64_t i = 0; i < parts[p].outputs; ++i) touched[static_cast<size_t>(parts[p].columns[i] / kPanel)] = true;
    for (int64_t panel = 0; panel < layout.panels; ++panel) {
      if (!touched[static_cast<size_t>(panel)]) continue;
      placed.push_back({panel, static_cast<int64_t>(p), first_rank});
      floats += parts[p].ranks * kPanel;
    }
    first_rank += parts[p].ranks;
  }
  std::stable_sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) { return a.panel < b.panel; });
  held.up = Buffer<uint8_t>(std::max<int64_t>(1, floats * size));
  held.first_piece.assign(static_cast<size_t>(layout.panels) + 1, 0);
  std::vector<std::vector<int64_t>> at_panel(parts.size());  // where each panel's piece of a part begins
  for (auto& each : at_panel) each.assign(static_cast<size_t>(layout.panels), -1);
  int64_t begin = 0;
  for (const Placed& each : placed) {
    const LowRankPart& part = parts[static_cast<size_t>(each.part)];
    held.pieces.push_back({each.first_rank, part.ranks, held.up.data() + begin * size});
    at_panel[static_cast<size_t>(each.part)][static_cast<size_t>(each.panel)] = begin;
    begin += part.ranks * kPanel;
    ++held.first_piece[static_cast<size_t>(each.panel) + 1];
  }
  for (size_t i = 1; i < held.first_piece.size(); ++i) held.first_piece[i] += held.first_piece[i - 1];
  for (size_t p = 0; p < parts.size(); ++p) {
    const LowRankPart& part = parts[p];
    for (int64_t i = 0; i < part.outputs; ++i) {
      const int64_t column = part.columns[i];
      uint8_t* piece = held.up.data() + at_panel[p][static_cast<size_t>(column / kPanel)] * size;
      for (int64_t r = 0; r < part.ranks; ++r) {
        store(piece + r * kPanel * size, column % kPanel, part.up[i * part.ranks + r]);
      }
    }
  }
  if (magnitudes != nullptr) {
    held.magnitudes = Buffer<float>(layout.panels * kPanel);
    std::copy(magnitudes, magnitudes + layout.outputs, held.magnitudes.data());
  }
  held.view = {exact_,
               width,
               padded_ranks,
               held.down.data(),
               held.pieces.data(),
               held.first_piece.data(),
               held.magnitudes.data()};
  most_ranks_ = std::max(most_ranks_, padded_ranks);
  bytes_ += held.down.bytes() + held.up.bytes() + held.magnitudes.bytes() +
            static_cast<int64_t>(held.pieces.size() * sizeof(LowRankPiece) + held.first_piece.size() * sizeof(int32_t));
}

int64_t Adapter::outputs(int64_t layer, Site site) const {
  const Product* product = product_at(layer, site);
  return product == nullptr ? 0 : product->weights.layout.outputs;
}

const LowRankView* Adapter::at(int64_t layer, Site site) const {
  const Held& held = held_[static_cast<size_t>(layer) * kSites + static_cast<size_t>(site)];
  return held.view.down == nullptr ? nullptr : &held.view;
}

void Model::check_adapters(const StepArgs& args) const {
  for (int64_t s = 0; args.slots != nullptr && s < args.sequences; ++s) {
    if (args.slots[s] < -1 || args.slots[s] >= args.adapter_count) {
      throw std::invalid_argument("the step has no adapter " + std::to_string(args.slots[s]));
    }
  }
  for (int64_t i = 0; i < args.adapter_count; ++i) {
    if (!args.adapters[i]->fits(*this)) throw std::invalid_argument("an adapter belongs to another model");
  }
}

// Before a step: room for what its adapters compute of a row. It grows once to what the largest adapter needs.
void Model::ready_adapters(const StepArgs& args) {
  has_adapters_ = false;
  int64_t ranks = 0;
  for (int64_t s = 0; args.slots != nullptr && s < args.sequences; ++s) {
    if (args.slots[s] < 0) continue;
    has_adapters_ = true;
    ranks = std::max(ranks, args.adapters[args.slots[s]]->most_ranks());
  }
  if (!has_adapters_) return;
  const int64_t stride = round_up(std::max<int64_t>(ranks, 1), 16);
  if (stride > low_.stride) {
    low_values_ = Buffer<float>(max_rows_ * stride);
    low_of_row_.resize(static_cast<size_t>(max_rows_));
    low_ = {low_of_row_.data(), low_values_.data(), stride};
  }
}

// What adapters add to a product of the rows that go on, or none.
const LowRank* Model::low_rank(const StepArgs& args, const Layer& layer, Site site, int64_t rows) {
  if (!has_adapters_) return nullptr;
  const int64_t index = &layer - w_.layers.data();
  bool any = false;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t source = asking_[static_cast<size_t>(r)].source;
    const int32_t slot = args.slots[row_[static_cast<size_t>(source)].sequence];
    const LowRankView* view = slot < 0 ? nullptr : args.adapters[slot]->at(index, site);
    low_of_row_[static_cast<size_t>(r)] = view;
    any = any || view != nullptr;
  }
  return any ? &low_ : nullptr;
}

}  // namespace headrace
