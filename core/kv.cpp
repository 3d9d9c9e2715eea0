#include "kv.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>

#include "layout.h"
#include "numbers.h"

namespace millrace {

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
  layout.record_bytes = layout.scales_offset + (type == KvType::kInt8 ? 2 * kBlock * 4 : 0);
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
      float* scales = reinterpret_cast<float*>(record + layout.scales_offset);
      float key_peak = absolute_peak(key, size);
      float value_peak = absolute_peak(value, size);
      float key_inverse = key_peak > 0.0f ? 127.0f / key_peak : 0.0f;
      float value_inverse = value_peak > 0.0f ? 127.0f / value_peak : 0.0f;
      scales[slot] = key_peak / 127.0f;
      scales[kBlock + slot] = value_peak / 127.0f;
      for (int64_t d = 0; d < padded; ++d) {
        record[(d / 4 * kBlock + slot) * 4 + d % 4] = d < size ? biased_code(key[d], key_inverse) : 128;
        values[d * 4] = d < size ? biased_code(value[d], value_inverse) : 128;
      }
      return;
    }
  }
}

}  // namespace millrace
