// What the operators, the process group and the binding share.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>

#include "runtime.h"

namespace sim {

inline StreamKey key_of(const c10::Stream& stream) {
  return {static_cast<int>(stream.device_index()), static_cast<int64_t>(stream.id())};
}
c10::Stream stream_of(StreamKey key);
c10::Device device_at(int index);

// A tensor of the CPU with the same memory. Does not keep it alive, like a kernel.
at::Tensor on_host(const at::Tensor& tensor);
Range range_of(const at::Tensor& tensor);

void register_backend();
const at::Generator& default_generator(int device);

// State as on CUDA: a seed, and how many numbers were drawn. The numbers of a kernel follow from both at its launch.
struct SimGenerator : c10::GeneratorImpl {
  explicit SimGenerator(int index);
  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  // The seed of one kernel.
  uint64_t draw();
  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

 private:
  SimGenerator* clone_impl() const override;
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

// Reads a table of tensors: see probes/scan/device_kernels.py.
at::Tensor scan_table(
    const at::Tensor& rows,
    const at::Tensor& addresses,
    const at::Tensor& orders,
    const at::Tensor& programs);
// The constants of digests and sketches.
void set_scan_constants(
    std::vector<uint64_t> word_keys,
    std::vector<uint64_t> block_seeds,
    std::string signs,
    uint64_t weight_seed);

} // namespace sim
