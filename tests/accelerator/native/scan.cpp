// The kernel that reads a table of tensors, by the contract of probes/scan/device_kernels.py.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend.h"

namespace sim {

namespace {

constexpr int64_t BLOCK_WORDS = 1024, FIELDS = 8, RESULTS = 5, DIMS = 8;
constexpr int64_t DIGEST = 1, SKETCH = 2, COUNT = 4;

struct Constants {
  std::vector<uint64_t> word_keys;
  std::vector<uint64_t> block_seeds;
  std::vector<double> signs;
  uint64_t weight_seed = 0;
};
Constants constants;

uint64_t splitmix64(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

double weight(int64_t block) {
  if (block == 0) return 1.0;
  uint64_t bits = splitmix64(constants.weight_seed, static_cast<uint64_t>(block));
  double magnitude = 0.5 + static_cast<double>(bits >> 11) * 0x1p-53;
  return bits & 1 ? magnitude : -magnitude;
}

uint64_t lane_of(int lane, const unsigned char* data, int64_t size) {
  const uint64_t* keys = constants.word_keys.data() + lane * BLOCK_WORDS;
  uint64_t seed = constants.block_seeds[static_cast<size_t>(lane)], total = 0;
  for (int64_t begin = 0, block = 0; begin < size; begin += 4 * BLOCK_WORDS, ++block) {
    int64_t end = std::min(size, begin + 4 * BLOCK_WORDS);
    uint64_t sum = 0;
    for (int64_t at = begin; at < end; at += 4) {
      uint32_t word = 0;
      std::memcpy(&word, data + at, static_cast<size_t>(std::min<int64_t>(4, end - at)));
      sum += keys[(at - begin) / 4] * word;
    }
    uint64_t number = static_cast<uint64_t>(block);
    total += splitmix64(seed, 2 * number) * (sum & 0xFFFFFFFF);
    total += splitmix64(seed, 2 * number + 1) * (sum >> 32);
  }
  return total;
}

template <typename Element>
void sketch(const int64_t* row, uint64_t address, const int64_t* order, int64_t* result) {
  const auto* data = reinterpret_cast<const Element*>(address);
  int64_t count = row[7], block_size = static_cast<int64_t>(constants.signs.size());
  bool ordered = row[6] >= 0;
  std::array<int64_t, DIMS> index{};
  int64_t offset = 0, nonfinite = 0;
  double value = 0, squares = 0, sum = 0;
  for (int64_t element = 0; element < count; ++element) {
    double number = static_cast<double>(static_cast<float>(0));
    if constexpr (std::is_same_v<Element, double>)
      number = data[ordered ? offset : element];
    else
      number = static_cast<double>(static_cast<float>(data[ordered ? offset : element]));
    if (!std::isfinite(number)) ++nonfinite;
    int64_t at = element % block_size;
    sum += number * constants.signs[static_cast<size_t>(at)];
    squares += number * number;
    if (at == block_size - 1 || element == count - 1) {
      value += sum * weight(element / block_size);
      sum = 0;
    }
    if (!ordered) continue;
    for (int64_t dim = order[0] - 1; dim >= 0; --dim) {
      size_t at_dim = static_cast<size_t>(dim);
      offset += order[1 + DIMS + dim];
      if (++index[at_dim] < order[1 + dim]) break;
      offset -= order[1 + dim] * order[1 + DIMS + dim];
      index[at_dim] = 0;
    }
  }
  if (nonfinite) {
    value = std::numeric_limits<double>::quiet_NaN();
    squares = std::numeric_limits<double>::infinity();
  }
  if (row[2] & SKETCH) {
    std::memcpy(result + 2, &value, 8);
    std::memcpy(result + 3, &squares, 8);
  }
  result[4] = nonfinite;
}

void scan_row(const int64_t* row, uint64_t address, const int64_t* orders, int64_t* result) {
  std::fill(result, result + RESULTS, 0);
  if (row[2] & DIGEST)
    for (int lane = 0; lane < 2; ++lane)
      result[lane] = static_cast<int64_t>(
          lane_of(lane, reinterpret_cast<const unsigned char*>(address), row[0]) + static_cast<uint64_t>(row[4 + lane]));
  if (!(row[2] & (SKETCH | COUNT))) return;
  const int64_t* order = orders + std::max<int64_t>(row[6], 0) * (1 + 2 * DIMS);
  switch (row[1]) {
    case 1: return sketch<float>(row, address, order, result);
    case 2: return sketch<c10::BFloat16>(row, address, order, result);
    case 3: return sketch<c10::Half>(row, address, order, result);
    case 4: return sketch<double>(row, address, order, result);
    default: return;
  }
}

} // namespace

void set_scan_constants(
    std::vector<uint64_t> word_keys, std::vector<uint64_t> block_seeds, std::string signs, uint64_t weight_seed) {
  std::vector<double> values;
  for (unsigned char byte : signs)
    for (int bit = 0; bit < 8; ++bit) values.push_back(byte >> bit & 1 ? 1.0 : -1.0);
  constants = {std::move(word_keys), std::move(block_seeds), std::move(values), weight_seed};
}

at::Tensor scan_table(
    const at::Tensor& rows, const at::Tensor& addresses, const at::Tensor& orders, const at::Tensor& programs) {
  int64_t count = rows.size(0);
  at::Tensor results = at::empty({count, RESULTS}, rows.options());
  const auto* row = static_cast<const int64_t*>(rows.data_ptr());
  const auto* address = static_cast<const uint64_t*>(addresses.data_ptr());
  const auto* order = static_cast<const int64_t*>(orders.data_ptr());
  auto* result = static_cast<int64_t*>(results.data_ptr());
  Ranges reads{range_of(rows), range_of(addresses), range_of(orders)};
  if (programs.numel() > 0) reads.push_back(range_of(programs));
  // The table is in the memory of the device: what it refers to is known only where kernels run at once.
  if (!settings().threaded && settings().log)
    for (int64_t index = 0; index < count; ++index)
      if (row[FIELDS * index + 2]) reads.emplace_back(address[index], row[FIELDS * index]);
  launch(
      current_stream(rows.device().index()), "scan_table",
      [=] {
        for (int64_t index = 0; index < count; ++index)
          scan_row(row + FIELDS * index, address[index], order, result + RESULTS * index);
      },
      reads, {range_of(results)});
  return results;
}

} // namespace sim
