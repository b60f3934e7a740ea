// Reads msgpack (github.com/msgpack/msgpack, spec.md) strictly: every form of nil, integers,
// floats, strings, bytes and arrays; anything else, bytes missing and bytes left over throw.
#pragma once

#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace vllm_lite::testing {

struct MsgpackValue {
  enum class Kind : uint8_t { kNil, kInteger, kFloat, kString, kArray };

  Kind kind = Kind::kNil;
  uint64_t bits = 0;  // an integer, in two's complement
  double real = 0;
  std::string text;
  std::vector<MsgpackValue> items;

  bool is_nil() const { return kind == Kind::kNil; }
  bool is_string() const { return kind == Kind::kString; }
  int64_t integer() const { return static_cast<int64_t>(expect(Kind::kInteger).bits); }
  uint64_t unsigned_integer() const { return expect(Kind::kInteger).bits; }
  double number() const { return expect(Kind::kFloat).real; }
  const std::string& string() const { return expect(Kind::kString).text; }
  const std::vector<MsgpackValue>& array() const { return expect(Kind::kArray).items; }

 private:
  const MsgpackValue& expect(Kind wanted) const {
    if (kind != wanted) throw std::runtime_error("msgpack: a value of another type");
    return *this;
  }
};

class MsgpackReader {
 public:
  static MsgpackValue read_all(std::string_view bytes) {
    MsgpackReader reader(bytes);
    MsgpackValue value = reader.read();
    if (!reader.left_.empty()) throw std::runtime_error("msgpack: bytes left over");
    return value;
  }

 private:
  explicit MsgpackReader(std::string_view bytes) : left_(bytes) {}

  std::string_view take(uint64_t count) {
    if (count > left_.size()) throw std::runtime_error("msgpack: bytes missing");
    const std::string_view taken = left_.substr(0, count);
    left_.remove_prefix(count);
    return taken;
  }
  uint64_t big_endian(uint64_t num_bytes) {
    uint64_t value = 0;
    for (const char byte : take(num_bytes)) value = value << 8 | static_cast<uint8_t>(byte);
    return value;
  }

  static MsgpackValue make_integer(uint64_t bits) {
    MsgpackValue value;
    value.kind = MsgpackValue::Kind::kInteger;
    value.bits = bits;
    return value;
  }
  static MsgpackValue make_float(double real) {
    MsgpackValue value;
    value.kind = MsgpackValue::Kind::kFloat;
    value.real = real;
    return value;
  }
  MsgpackValue make_string(uint64_t size) {
    MsgpackValue value;
    value.kind = MsgpackValue::Kind::kString;
    value.text = take(size);
    return value;
  }
  MsgpackValue make_array(uint64_t size) {
    MsgpackValue value;
    value.kind = MsgpackValue::Kind::kArray;
    for (uint64_t i = 0; i < size; ++i) value.items.push_back(read());
    return value;
  }

  MsgpackValue read() {
    const uint64_t type = big_endian(1);
    if (type < 0x80) return make_integer(type);
    if (type >= 0xe0) return make_integer(type - 0x100);
    if ((type & 0xe0) == 0xa0) return make_string(type & 0x1f);
    if ((type & 0xf0) == 0x90) return make_array(type & 0x0f);
    switch (type) {
      case 0xc0:
        return {};
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return make_string(big_endian(uint64_t{1} << (type - 0xc4)));
      case 0xca:
        return make_float(std::bit_cast<float>(static_cast<uint32_t>(big_endian(4))));
      case 0xcb:
        return make_float(std::bit_cast<double>(big_endian(8)));
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf:
        return make_integer(big_endian(uint64_t{1} << (type - 0xcc)));
      case 0xd0:
        return make_integer(static_cast<uint64_t>(static_cast<int8_t>(big_endian(1))));
      case 0xd1:
        return make_integer(static_cast<uint64_t>(static_cast<int16_t>(big_endian(2))));
      case 0xd2:
        return make_integer(static_cast<uint64_t>(static_cast<int32_t>(big_endian(4))));
      case 0xd3:
        return make_integer(big_endian(8));
      case 0xd9:
      case 0xda:
      case 0xdb:
        return make_string(big_endian(uint64_t{1} << (type - 0xd9)));
      case 0xdc:
      case 0xdd:
        return make_array(big_endian(type == 0xdc ? 2 : 4));
      default:
        throw std::runtime_error("msgpack: type " + std::to_string(type));
    }
  }

  std::string_view left_;
};

}  // namespace vllm_lite::testing
