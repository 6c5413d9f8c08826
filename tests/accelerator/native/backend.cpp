// What torch asks of a device: allocators, the guard with streams and events, generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <random>

#include "backend.h"

namespace sim {

c10::Device device_at(int index) {
  return c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index));
}

c10::Stream stream_of(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(key.device), key.id);
}

SimGenerator::SimGenerator(int index)
    : c10::GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void SimGenerator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t SimGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom(true));
  return seed_;
}

void SimGenerator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.numel() == 16, "sim: the state of a generator has 16 bytes");
  std::memcpy(&seed_, state.data(), 8);
  std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
}

c10::intrusive_ptr<c10::TensorImpl> SimGenerator::get_state() const {
  at::Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
  std::memcpy(state.data_ptr(), &seed_, 8);
  std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
  return state.getIntrusivePtr();
}

uint64_t SimGenerator::draw() {
  uint64_t z = seed_ + (offset_ / 4 + 1) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  offset_ += 4;
  return z ^ (z >> 31);
}

SimGenerator* SimGenerator::clone_impl() const {
  auto* copy = new SimGenerator(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

const at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < MOST_DEVICES; ++index) {
      made->push_back(at::make_generator<SimGenerator>(index));
      made->back().seed();
    }
    return made;
  }();
  return generators->at(static_cast<size_t>(device < 0 ? current_device() : device));
}

namespace {

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device();
    void* address = size > 0 ? sim::allocate(device, size) : nullptr;
    return {address, address, &release, device_at(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t count) const override {
    std::memcpy(target, source, count);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = allocate_pinned(size);
    return {address, address, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* target, const void* source, size_t count) const override {
    std::memcpy(target, source, count);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

EventPointer& as_event(void* event) { return *static_cast<EventPointer*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_at(exchange_device(device.has_index() ? device.index() : current_device()));
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }

  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
  c10::Stream getStream(c10::Device device) const override { return stream_of(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({index_of(device), 0}); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(new_stream(index_of(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream_of(exchange_stream(key_of(stream))); }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(key_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(key_of(stream), "synchronize_stream", "");
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize_device(index); }
  bool isStreamCapturing(const c10::Stream& stream) const override { return is_capturing(key_of(stream)); }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPointer*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventPointer(make_event());
    sim::record(as_event(*event), key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) sim::block(as_event(event), key_of(stream));
  }
  bool queryEvent(void* event) const override { return event == nullptr || query(as_event(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(as_event(event));
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return elapsed_milliseconds(as_event(begin), as_event(end));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get_context(), key_of(stream));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<SimGenerator>(index < 0 ? current_device() : index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void* data) const override { return device_at(device_of(data)); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DataPtr memory = device_allocator.allocate(size);
    if (size > 0 && storage.nbytes() > 0) std::memcpy(memory.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

} // namespace

void register_backend() {
  c10::SetAllocator(c10::kPrivateUse1, &device_allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace sim
