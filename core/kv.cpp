#include "kv.h"

#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#include "layout.h"
#include "numbers.h"

namespace headrace {

KvType kv_type_from_name(const std::string& name) {
  if (name == "f32") return KvType::kF32;
  if (name == "bf16") return KvType::kBf16;
  if (name == "int8") return KvType::kInt8;
  throw std::invalid_argument("unknown KV type '" + name + "': expected f32, bf16 or int8");
}

KvLayout KvLayout::of(int64_t layers, int64_t heads, int64_t head_size, KvType type) {
  if (layers < 1 || layers > 4096 || heads < 1 || heads > 4096 || head_size < 1 || head_size > 1024) {
    throw std::invalid_argument("KV sizes out of range");
  }
  KvLayout layout;
  layout.type = type;
  layout.layers = layers;
  layout.heads = heads;
  layout.head_size = head_size;
  layout.padded_size = round_up(head_size, 16);
  int64_t element = type == KvType::kF32 ? 4 : type == KvType::kBf16 ? 2 : 1;
  layout.values_offset = layout.padded_size * kBlock * element;
  layout.scales_offset = 2 * layout.values_offset;
  layout.record_bytes = layout.scales_offset + (type == KvType::kInt8 ? 2 * kBlock * 2 : 0);
  layout.block_bytes = layout.record_bytes * heads;
  return layout;
}

Kv::Kv(KvLayout layout, int64_t blocks) : layout_(layout), blocks_(blocks) {
  if (blocks < 1 || blocks > (int64_t{1} << 40) / (layout.block_bytes * layout.layers)) {
    throw std::invalid_argument("KV blocks out of range: " + std::to_string(blocks));
  }
  bytes_ = static_cast<size_t>(layout.block_bytes * layout.layers * blocks);
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(memory);
}

Kv::~Kv() { munmap(data_, bytes_); }

void Kv::copy_block(int64_t source, int64_t target) {
  for (int64_t layer = 0; layer < layout_.layers; ++layer) {
    std::memcpy(record(layer, target, 0), record(layer, source, 0), static_cast<size_t>(layout_.block_bytes));
  }
}

void Kv::read_block(int64_t block, uint8_t* bytes) {
  const size_t size = static_cast<size_t>(layout_.block_bytes);
  for (int64_t layer = 0; layer < layout_.layers; ++layer, bytes += size) {
    std::memcpy(bytes, record(layer, block, 0), size);
  }
}

void Kv::write_block(int64_t block, const uint8_t* bytes) {
  const size_t size = static_cast<size_t>(layout_.block_bytes);
  for (int64_t layer = 0; layer < layout_.layers; ++layer, bytes += size) {
    std::memcpy(record(layer, block, 0), bytes, size);
  }
}

namespace {

// NaN where a value is: a broken token must not look like a good one.
float absolute_peak(const float* values, int64_t count) {
  float peak = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    float magnitude = values[i] < 0.0f ? -values[i] : values[i];
    if (magnitude > peak || magnitude != magnitude) peak = magnitude;
  }
  return peak;
}

inline uint8_t biased_code(float value, float inverse) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  float rounded = (value * inverse + kRounder) - kRounder;
  if (!(rounded >= -127.0f)) rounded = -127.0f;  // also NaN
  if (rounded > 127.0f) rounded = 127.0f;
  return static_cast<uint8_t>(static_cast<int32_t>(rounded) + 128);
}

struct Scale {
  uint16_t bits;  // f16
  float inverse;
};

// Quantise with the scale as stored, so that its rounding adds no error.
inline Scale scale_of(float peak) {
  constexpr float kMost = 65504.0f;
  float scale = peak / 127.0f;
  if (scale > kMost && scale <= std::numeric_limits<float>::max()) scale = kMost;
  const uint16_t bits = f16_from_f32(scale);
  const float held = f32_from_f16(bits);
  return {bits, held > 0.0f ? 1.0f / held : 0.0f};
}

}  // namespace

void write_token(const KvLayout& layout, uint8_t* record, int64_t slot, const float* key, const float* value) {
  int64_t size = layout.head_size;
  int64_t padded = layout.padded_size;
  switch (layout.type) {
    case KvType::kF32: {
      float* keys = reinterpret_cast<float*>(record);
      float* values = reinterpret_cast<float*>(record + layout.values_offset) + slot * padded;
      for (int64_t d = 0; d < size; ++d) keys[d * kBlock + slot] = key[d];
      std::memcpy(values, value, static_cast<size_t>(size) * sizeof(float));
      return;
    }
    case KvType::kBf16: {
      uint16_t* keys = reinterpret_cast<uint16_t*>(record);
      uint16_t* values = reinterpret_cast<uint16_t*>(record + layout.values_offset) + slot / 2 * padded * 2 + slot % 2;
      for (int64_t d = 0; d < size; ++d) keys[(d / 2 * kBlock + slot) * 2 + d % 2] = bf16_from_f32(key[d]);
      for (int64_t d = 0; d < size; ++d) values[d * 2] = bf16_from_f32(value[d]);
      return;
    }
    case KvType::kInt8: {
      uint8_t* values = record + layout.values_offset + slot / 4 * padded * 4 + slot % 4;
      uint16_t* scales = reinterpret_cast<uint16_t*>(record + layout.scales_offset);
      const Scale of_key = scale_of(absolute_peak(key, size));
      const Scale of_value = scale_of(absolute_peak(value, size));
      scales[slot] = of_key.bits;
      scales[kBlock + slot] = of_value.bits;
      for (int64_t d = 0; d < padded; ++d) {
        record[(d / 4 * kBlock + slot) * 4 + d % 4] = d < size ? biased_code(key[d], of_key.inverse) : 128;
        values[d * 4] = d < size ? biased_code(value[d], of_value.inverse) : 128;
      }
      return;
    }
  }
}

}  // namespace headrace
