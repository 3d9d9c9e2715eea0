#include "kv.h"

#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

#include "layout.h"
#include "numbers.h"
#include "rotation.h"

namespace headrace {

KvType kv_type_from_name(const std::string& name) {
  if (name == "f32") return KvType::kF32;
  if (name == "bf16") return KvType::kBf16;
  if (name == "int8") return KvType::kInt8;
  if (name == "fp8") return KvType::kFp8;
  if (name == "int4") return KvType::kInt4;
  throw std::invalid_argument("unknown KV type '" + name + "': expected f32, bf16, int8, fp8 or int4");
}

KvLayout KvLayout::of(int64_t heads, int64_t head_size, int64_t value_size, KvType type, bool values_in_keys) {
  constexpr int64_t kMostSize = 1024;
  if (heads < 1 || heads > 4096 || head_size < 1 || head_size > kMostSize || value_size < 1 || value_size > kMostSize) {
    throw std::invalid_argument("KV sizes out of range");
  }
  if (values_in_keys && value_size > head_size) throw std::invalid_argument("values are wider than keys");
  KvLayout layout;
  layout.type = type;
  layout.values_in_keys = values_in_keys;
  layout.heads = heads;
  layout.head_size = head_size;
  layout.padded_size = round_up(head_size, 16);
  layout.value_size = value_size;
  layout.padded_value_size = round_up(value_size, 16);
  const int64_t bits = type == KvType::kF32 ? 32 : type == KvType::kBf16 ? 16 : type == KvType::kInt4 ? 4 : 8;
  const int64_t turned = values_in_keys ? head_size - value_size : head_size;
  layout.rotated =
      (type == KvType::kInt8 || type == KvType::kInt4) && Rotation::fits(turned) && Rotation::fits(value_size);
  layout.value_columns = layout.padded_value_size / 16;
  if (type == KvType::kInt4) layout.value_columns = round_up(layout.value_columns, 2);
  layout.values_offset = kBlock * layout.padded_size * bits / 8;
  layout.scales_offset = layout.values_offset;
  if (!values_in_keys) layout.scales_offset += kBlock * layout.value_columns * 16 * bits / 8;
  layout.record_bytes = layout.scales_offset + (layout.has_scales() ? 2 * kBlock * 2 : 0);  // of whole lines
  layout.block_bytes = layout.record_bytes * heads;
  return layout;
}

Kv::Kv(std::vector<KvLayout> layouts, int64_t blocks) : layouts_(std::move(layouts)), blocks_(blocks) {
  if (layouts_.empty() || layouts_.size() > 4096) throw std::invalid_argument("KV layers out of range");
  for (const KvLayout& layout : layouts_) block_bytes_ += layout.block_bytes;
  if (blocks < 1 || blocks > (int64_t{1} << 40) / block_bytes_) {
    throw std::invalid_argument("KV blocks out of range: " + std::to_string(blocks));
  }
  int64_t start = 0;
  for (const KvLayout& layout : layouts_) {
    starts_.push_back(start);
    start += layout.block_bytes * blocks;
  }
  bytes_ = static_cast<size_t>(start);
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(memory);
}

Kv::~Kv() { munmap(data_, bytes_); }

void Kv::copy_block(int64_t source, int64_t target) {
  for (int64_t layer = 0; layer < layers(); ++layer) {
    std::memcpy(record(layer, target, 0), record(layer, source, 0), static_cast<size_t>(layout(layer).block_bytes));
  }
}

void Kv::read_block(int64_t block, uint8_t* bytes) {
  for (int64_t layer = 0; layer < layers(); ++layer) {
    const int64_t size = layout(layer).block_bytes;
    std::memcpy(bytes, record(layer, block, 0), static_cast<size_t>(size));
    bytes += size;
  }
}

void Kv::write_block(int64_t block, const uint8_t* bytes) {
  for (int64_t layer = 0; layer < layers(); ++layer) {
    const int64_t size = layout(layer).block_bytes;
    std::memcpy(record(layer, block, 0), bytes, static_cast<size_t>(size));
    bytes += size;
  }
}

namespace {

// The value of the largest size. NaN where a value is: a broken token must not look like a good one.
float extreme(const float* values, int64_t count) {
  float peak = 0.0f;
  float found = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = values[i] < 0.0f ? -values[i] : values[i];
    if (magnitude > peak || magnitude != magnitude) {
      peak = magnitude;
      found = values[i];
    }
  }
  return found;
}

template <int kLeast, int kMost>
inline uint8_t biased_code(float value, float inverse) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  constexpr float kLower = static_cast<float>(kLeast);
  constexpr float kUpper = static_cast<float>(kMost);
  float rounded = (value * inverse + kRounder) - kRounder;
  if (!(rounded >= kLower)) rounded = kLower;  // also NaN
  if (rounded > kUpper) rounded = kUpper;
  return static_cast<uint8_t>(static_cast<int32_t>(rounded) + kMost + 1);
}

struct Scale {
  uint16_t bits;  // f16
  float inverse;
};

// Quantise with the scale as stored, so that its rounding adds no error.
inline Scale scale_of(float value, float code) {
  constexpr float kMost = 65504.0f;
  constexpr float kFinite = std::numeric_limits<float>::max();
  float scale = value / code;
  if (scale > kMost && scale <= kFinite) scale = kMost;
  if (scale < -kMost && scale >= -kFinite) scale = -kMost;
  const uint16_t bits = f16_from_f32(scale);
  const float held = f32_from_f16(bits);
  return {bits, held > 0.0f || held < 0.0f ? 1.0f / held : 0.0f};
}

struct Scales {  // their inverses
  float key;
  float value;
};

// `code` is what the value of the largest size becomes: a positive one whatever its sign, or a negative one by a scale
// that has its sign turned.
inline Scales write_scales(const KvLayout& layout, uint8_t* record, int64_t slot, const float* key, const float* value,
                           float code) {
  auto scale = [&](const float* values, int64_t size) {
    const float found = extreme(values, size);
    return scale_of(code > 0.0f && found < 0.0f ? -found : found, code);
  };
  const Scale of_key = scale(key, layout.head_size);
  uint16_t* scales = reinterpret_cast<uint16_t*>(record + layout.scales_offset);
  scales[slot] = of_key.bits;
  if (layout.values_in_keys) return {of_key.inverse, of_key.inverse};
  const Scale of_value = scale(value, layout.value_size);
  scales[kBlock + slot] = of_value.bits;
  return {of_key.inverse, of_value.inverse};
}

// A byte for each dim: what `code` makes of a value and the inverse of its scale, and `zero` where the padding is.
template <typename Code>
void write_bytes(const KvLayout& layout, uint8_t* record, int64_t slot, const float* key, const float* value,
                 const Scales& scales, uint8_t zero, const Code& code) {
  uint8_t* values = record + layout.values_offset + slot / 4 * layout.padded_value_size * 4 + slot % 4;
  for (int64_t d = 0; d < layout.padded_size; ++d) {
    record[(d / 4 * kBlock + slot) * 4 + d % 4] = d < layout.head_size ? code(key[d], scales.key) : zero;
  }
  if (layout.values_in_keys) return;
  for (int64_t d = 0; d < layout.padded_value_size; ++d) {
    values[d * 4] = d < layout.value_size ? code(value[d], scales.value) : zero;
  }
}

}  // namespace

void write_token(const KvLayout& layout, uint8_t* record, int64_t slot, const float* key, const float* value) {
  const int64_t size = layout.head_size;
  const int64_t value_size = layout.value_size;
  const int64_t padded_values = layout.padded_value_size;
  switch (layout.type) {
    case KvType::kF32: {
      float* keys = reinterpret_cast<float*>(record);
      float* values = reinterpret_cast<float*>(record + layout.values_offset) + slot * padded_values;
      for (int64_t d = 0; d < size; ++d) keys[d * kBlock + slot] = key[d];
      if (layout.values_in_keys) return;
      std::memcpy(values, value, static_cast<size_t>(value_size) * sizeof(float));
      return;
    }
    case KvType::kBf16: {
      uint16_t* keys = reinterpret_cast<uint16_t*>(record);
      uint16_t* values =
          reinterpret_cast<uint16_t*>(record + layout.values_offset) + slot / 2 * padded_values * 2 + slot % 2;
      for (int64_t d = 0; d < size; ++d) keys[(d / 2 * kBlock + slot) * 2 + d % 2] = bf16_from_f32(key[d]);
      if (layout.values_in_keys) return;
      for (int64_t d = 0; d < value_size; ++d) values[d * 2] = bf16_from_f32(value[d]);
      return;
    }
    case KvType::kInt8: {
      const Scales scales = write_scales(layout, record, slot, key, value, 127.0f);
      write_bytes(layout, record, slot, key, value, scales, 128, biased_code<-127, 127>);
      return;
    }
    case KvType::kFp8: {
      const Scales scales = write_scales(layout, record, slot, key, value, E4m3::kMost);
      auto code = [](float number, float inverse) { return e4m3_from_f32(number * inverse); };
      write_bytes(layout, record, slot, key, value, scales, 0, code);
      return;
    }
    case KvType::kInt4: {
      uint8_t* values = record + layout.values_offset + slot / 4 * layout.value_columns * 32 + slot % 4;
      // One side has a code more than the other: the side with the largest value.
      const Scales scales = write_scales(layout, record, slot, key, value, -8.0f);
      auto pair = [](const float* from, int64_t count, int64_t d, int64_t upper, float inverse) {
        const int low = d < count ? biased_code<-8, 7>(from[d], inverse) : 8;
        const int high = upper < count ? biased_code<-8, 7>(from[upper], inverse) : 8;
        return static_cast<uint8_t>(low | (high << 4));
      };
      for (int64_t d = 0; d < layout.padded_size; d += 8) {
        for (int64_t i = 0; i < 4; ++i) {
          record[(d / 8 * kBlock + slot) * 4 + i] = pair(key, size, d + i, d + 4 + i, scales.key);
        }
      }
      if (layout.values_in_keys) return;
      for (int64_t d = 0; d < layout.value_columns * 16; d += 32) {
        for (int64_t i = 0; i < 16; ++i) {
          values[(d / 2 + i) * 4] = pair(value, value_size, d + i, d + 16 + i, scales.value);
        }
      }
      return;
    }
  }
}

}  // namespace headrace
