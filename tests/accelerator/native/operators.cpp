// Operators: kernels of the CPU on the memory of the device, launched on the current stream.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <mutex>

#include "backend.h"

namespace sim {

namespace {

using torch::jit::Stack;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

struct Arguments {
  // For the kernel of the CPU.
  Stack stack;
  // For the inference of shapes.
  Stack meta;
  Ranges reads, writes;
  // Written arguments, by their position in the stack; several for a list.
  std::vector<std::pair<size_t, std::vector<at::Tensor>>> written;
  // All tensors on the device, to find the one that a view is of.
  std::vector<at::Tensor> tensors;
  int device = -1;
};

at::Tensor meta_of(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).pinned_memory(false));
}

at::Tensor convert(Arguments& arguments, const at::Tensor& tensor, bool written, bool keep) {
  if (!tensor.defined()) return tensor;
  if (!on_device(tensor)) {
    // A number is read at the launch. Larger tensors have to be on the device, unless memory is unified.
    TORCH_CHECK(
        tensor.dim() == 0 || settings().unified || tensor.is_meta(),
        "sim: expected all tensors to be on the device, found one on ", tensor.device());
    if (written && tensor.dim() > 0) arguments.device = arguments.device < 0 ? -2 : arguments.device;
    return keep && !written ? tensor.clone() : tensor;
  }
  if (arguments.device < 0) arguments.device = tensor.device().index();
  arguments.tensors.push_back(tensor);
  if (tensor.numel() > 0) (written ? arguments.writes : arguments.reads).push_back(range_of(tensor));
  return on_host(tensor);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// The generator gives one seed per kernel, at the launch: the kernel may run at any time.
c10::IValue seeded(const c10::IValue& value, int device) {
  // A script for the CPU gets the numbers that it gets there.
  if (settings().unified && !settings().threaded && (!value.isGenerator() || value.toGenerator().device().is_cpu()))
    return value;
  at::Generator source = value.isGenerator() ? value.toGenerator() : default_generator(device);
  std::lock_guard<std::mutex> lock(source.mutex());
  uint64_t seed = source.device().is_cpu()
      ? at::check_generator<at::CPUGeneratorImpl>(source)->random64()
      : at::check_generator<SimGenerator>(source)->draw();
  return at::detail::createCPUGenerator(seed);
}

bool is_generator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

Arguments convert_all(const c10::FunctionSchema& schema, const Stack& stack, bool keep) {
  Arguments result;
  size_t count = schema.arguments().size(), first = stack.size() - count;
  for (size_t index = 0; index < count; ++index) {
    const c10::IValue& value = stack[first + index];
    bool written = is_written(schema.arguments()[index]);
    std::vector<at::Tensor> originals;
    if (value.isTensor()) {
      originals.push_back(value.toTensor());
      result.stack.emplace_back(convert(result, originals[0], written, keep));
      result.meta.emplace_back(originals[0].defined() ? meta_of(originals[0]) : originals[0]);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> aliases, metas;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        originals.push_back(tensor);
        aliases.push_back(convert(result, tensor, written, keep));
        metas.push_back(tensor.defined() ? meta_of(tensor) : tensor);
      }
      result.stack.emplace_back(aliases);
      result.meta.emplace_back(metas);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> aliases, metas;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        bool empty = !tensor.has_value() || !tensor->defined();
        aliases.push_back(empty ? tensor : std::optional<at::Tensor>(convert(result, *tensor, written, keep)));
        metas.push_back(empty ? tensor : std::optional<at::Tensor>(meta_of(*tensor)));
      }
      result.stack.emplace_back(aliases);
      result.meta.emplace_back(metas);
    } else {
      result.stack.push_back(value);
      result.meta.push_back(value);
    }
    if (written && !originals.empty()) result.written.emplace_back(index, originals);
  }
  // Factories have no tensor, but a device.
  for (size_t index = 0; index < count; ++index) {
    c10::IValue& value = result.stack[index];
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      if (result.device < 0) result.device = value.toDevice().has_index() ? value.toDevice().index() : current_device();
      value = c10::Device(c10::kCPU);
      result.meta[index] = c10::Device(c10::kMeta);
    }
  }
  if (result.device < 0) result.device = current_device();
  for (size_t index = 0; index < count; ++index)
    if (is_generator(schema.arguments()[index])) result.stack[index] = seeded(result.stack[index], result.device);
  return result;
}

// An output on the device. `like` has its shape, on another device.
at::Tensor output(const at::Tensor& like, int device) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device_at(device)));
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& view) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), view.dtype());
  auto begin = static_cast<const char*>(base.storage().data());
  auto offset = static_cast<const char*>(view.data_ptr()) - begin;
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(offset / static_cast<int64_t>(view.element_size()));
  impl->set_sizes_and_strides(view.sizes(), view.strides());
  return result;
}

bool is_view(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && !argument.alias_info()->isWrite();
}

// The tensor whose memory `view` is in.
at::Tensor base_of(const Arguments& arguments, const at::Tensor& view) {
  for (const at::Tensor& tensor : arguments.tensors) {
    auto begin = static_cast<const char*>(tensor.storage().data());
    auto at = static_cast<const char*>(view.data_ptr());
    if (begin <= at && at < begin + tensor.storage().nbytes()) return tensor;
  }
  return arguments.tensors.at(0);
}

// What the operator returns of a written argument: the argument with the same alias set.
c10::IValue written_argument(const c10::FunctionSchema& schema, size_t index, const Stack& stack) {
  const auto& wanted = schema.returns()[index].alias_info()->beforeSets();
  size_t first = stack.size() - schema.arguments().size();
  for (size_t number = 0; number < schema.arguments().size(); ++number) {
    const auto* info = schema.arguments()[number].alias_info();
    if (info != nullptr && info->isWrite() && info->beforeSets() == wanted) return stack[first + number];
  }
  TORCH_CHECK(false, "sim: no written argument for a result of ", schema.name());
}

// An operator may have resized what it writes to: the memory of the device follows.
void take_resized(const at::Tensor& original, const at::Tensor& now) {
  if (!on_device(original) || !now.defined()) return;
  if (original.sizes() == now.sizes() && original.data_ptr() == now.data_ptr()) return;
  if (original.sizes() != now.sizes()) original.resize_(now.sizes());
  if (now.is_meta() || original.numel() == 0) return;
  on_host(original).copy_(now);
}

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

// Runs the kernel now, after everything before it on its stream.
void run_now(const c10::OperatorHandle& op, const c10::FunctionSchema& schema, Stack* stack) {
  Arguments arguments = convert_all(schema, *stack, false);
  StreamKey stream = current_stream(arguments.device);
  if (settings().threaded || is_capturing(stream)) synchronize_stream(stream, "implicit", schema.name());
  Stack results = arguments.stack;
  run_on_cpu(op, &results);
  for (const auto& [index, originals] : arguments.written) {
    auto now = tensors_in(arguments.stack[index]);
    for (size_t number = 0; number < originals.size(); ++number) take_resized(originals[number], now[number]);
  }
  Stack outputs;
  auto to_device = [&](const at::Tensor& result, bool view) {
    if (!result.defined() || on_device(result)) return result;
    if (view) return view_of(base_of(arguments, result), result);
    at::Tensor copy = output(result, arguments.device);
    if (result.numel() > 0) {
      on_host(copy).copy_(result);
      arguments.writes.push_back(range_of(copy));
    }
    return copy;
  };
  bool only_views = !schema.returns().empty();
  for (size_t index = 0; index < schema.returns().size(); ++index) {
    const c10::Argument& returned = schema.returns()[index];
    only_views = only_views && is_view(returned);
    if (is_written(returned)) {
      outputs.push_back(written_argument(schema, index, *stack));
    } else if (results[index].isTensor()) {
      outputs.emplace_back(to_device(results[index].toTensor(), is_view(returned)));
    } else if (results[index].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : results[index].toTensorVector()) list.push_back(to_device(each, is_view(returned)));
      outputs.emplace_back(list);
    } else {
      outputs.push_back(results[index]);
    }
  }
  if (!only_views) launch(stream, schema.name(), [] {}, arguments.reads, arguments.writes);
  torch::jit::drop(*stack, schema.arguments().size());
  for (auto& each : outputs) stack->push_back(std::move(each));
}

// Whether shapes of results depend on values, or results are not tensors.
bool depends_on_values(const c10::OperatorHandle& op, const c10::FunctionSchema& schema) {
  for (const auto& tag : op.getTags())
    if (tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output) return true;
  for (const auto& returned : schema.returns()) {
    if (is_view(returned)) return true;
    auto kind = returned.type()->str();
    if (kind != "Tensor" && kind != "Tensor[]") return true;
  }
  return false;
}

// Launches the kernel; false if it has to run now.
bool run_later(const c10::OperatorHandle& op, const c10::FunctionSchema& schema, Stack* stack) {
  if (depends_on_values(op, schema)) return false;
  Arguments arguments = convert_all(schema, *stack, true);
  Stack shapes = arguments.meta;
  try {
    for (const auto& [index, originals] : arguments.written)
      for (const at::Tensor& tensor : originals)
        if (!on_device(tensor)) return false;
    run_on_cpu(op, &shapes);
  } catch (const c10::Error&) {
    return false;
  }
  bool resized = false;
  for (const auto& [index, originals] : arguments.written) {
    auto now = tensors_in(arguments.meta[index]);
    for (size_t number = 0; number < originals.size(); ++number)
      if (originals[number].sizes() != now[number].sizes()) {
        originals[number].resize_(now[number].sizes());
        resized = true;
      }
  }
  if (resized) {
    Arguments again = convert_all(schema, *stack, true);
    arguments.stack = again.stack;
    arguments.writes = again.writes;
  }
  Stack outputs;
  std::vector<std::vector<at::Tensor>> memories;
  for (size_t index = 0; index < schema.returns().size(); ++index) {
    memories.emplace_back();
    if (is_written(schema.returns()[index])) {
      outputs.push_back(written_argument(schema, index, *stack));
      continue;
    }
    c10::List<at::Tensor> list;
    for (const at::Tensor& shape : tensors_in(shapes[index])) {
      at::Tensor each = shape.defined() ? output(shape, arguments.device) : shape;
      list.push_back(each);
      bool filled = each.defined() && each.numel() > 0;
      memories.back().push_back(filled ? on_host(each) : at::Tensor());
      if (filled) arguments.writes.push_back(range_of(each));
    }
    if (shapes[index].isTensor())
      outputs.emplace_back(list.get(0));
    else
      outputs.emplace_back(list);
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  for (const auto& [index, originals] : arguments.written) {
    auto aliases = tensors_in(arguments.stack[index]);
    for (size_t number = 0; number < originals.size(); ++number)
      written.emplace_back(aliases[number], on_host(originals[number]));
  }
  launch(
      current_stream(arguments.device), schema.name(),
      [op, memories, written, values = arguments.stack] {
        Stack results = values;
        run_on_cpu(op, &results);
        // Where the operator has moved a result to memory of its own.
        for (const auto& [computed, memory] : written)
          if (computed.data_ptr() != memory.data_ptr()) memory.copy_(computed);
        for (size_t index = 0; index < memories.size(); ++index) {
          auto computed = tensors_in(results[index]);
          for (size_t number = 0; number < memories[index].size(); ++number)
            if (memories[index][number].defined()) memories[index][number].copy_(computed.at(number));
        }
      },
      arguments.reads, arguments.writes);
  torch::jit::drop(*stack, schema.arguments().size());
  for (auto& each : outputs) stack->push_back(std::move(each));
  return true;
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Settings now = settings();
  int device = current_device();
  for (size_t index = stack->size() - schema.arguments().size(); index < stack->size(); ++index)
    if ((*stack)[index].isTensor() && on_device((*stack)[index].toTensor())) {
      device = (*stack)[index].toTensor().device().index();
      break;
    }
  if ((now.threaded || is_capturing(current_stream(device))) && run_later(op, schema, stack)) return;
  run_now(op, schema, stack);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) { run(op, stack); }

const c10::OperatorHandle& find(const char* name) {
  static std::map<std::string, c10::OperatorHandle> found;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  auto item = found.find(name);
  if (item == found.end())
    item = found.emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  return item->second;
}

void convolution(const c10::OperatorHandle&, Stack* stack) { run(find("aten::convolution"), stack); }

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  // The sizes of the bias: one per output channel of the gradient.
  size_t first = stack->size() - 10;
  int64_t channels = (*stack)[first].toTensor().size(1);
  stack->insert(stack->begin() + static_cast<std::ptrdiff_t>(first) + 3, c10::IValue(std::vector<int64_t>{channels}));
  run(find("aten::convolution_backward"), stack);
}

// Autograd calls these on any device but the CPU, so the CPU has none. The workspace is that of CUDA.
std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates,
    const at::Tensor& hidden_gates,
    const at::Tensor& hidden,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  auto input = input_bias.has_value() && input_bias->defined() ? input_gates + *input_bias : input_gates;
  auto state = hidden_bias.has_value() && hidden_bias->defined() ? hidden_gates + *hidden_bias : hidden_gates;
  auto from_input = input.chunk(3, 1), from_state = state.chunk(3, 1);
  auto reset = (from_input[0] + from_state[0]).sigmoid(), update = (from_input[1] + from_state[1]).sigmoid();
  auto candidate = (from_input[2] + reset * from_state[2]).tanh();
  auto result = candidate + update * (hidden - candidate);
  return {result, at::cat({reset, update, candidate, hidden, from_state[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  const auto &reset = parts[0], &update = parts[1], &candidate = parts[2], &hidden = parts[3];
  auto of_candidate = gradient * (1 - update) * (1 - candidate * candidate);
  auto of_update = gradient * (hidden - candidate) * update * (1 - update);
  auto of_reset = of_candidate * parts[4] * reset * (1 - reset);
  auto of_input = at::cat({of_reset, of_update, of_candidate}, 1);
  auto of_state = at::cat({of_reset, of_update, of_candidate * reset}, 1);
  at::Tensor none;
  return {
      of_input, of_state, gradient * update, has_bias ? of_input.sum(0) : none, has_bias ? of_state.sum(0) : none};
}

c10::Device chosen(const std::optional<c10::Device>& device) {
  return device_at(device.has_value() && device->has_index() ? device->index() : current_device());
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(c10::kPrivateUse1), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(
      size, c10::GetAllocator(c10::kPrivateUse1), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

const at::Tensor& resize(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  auto* impl = self.unsafeGetTensorImpl();
  if (self.storage().nbytes() > 0 && settings().threaded)
    synchronize_stream(current_stream(self.device().index()), "implicit", "resize_");
  at::native::resize_impl_cpu_(impl, size, std::nullopt);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

// On the current stream; pageable memory of the host makes it wait.
void copy_memory(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return;
  bool to_host = !on_device(target), from_host = !on_device(source);
  int device = from_host ? target.device().index() : source.device().index();
  StreamKey stream = current_stream(device);
  const at::Tensor* host = to_host ? &target : from_host ? &source : nullptr;
  bool pinned = host != nullptr && is_pinned(host->data_ptr());
  bool waits = host != nullptr && (!non_blocking || (to_host && !pinned));
  if (waits) refuse_in_capture("a copy that waits");
  at::Tensor from = from_host ? (pinned && !waits ? source.alias() : source.clone()) : on_host(source);
  at::Tensor to = to_host ? target.alias() : on_host(target);
  if (!from_host && !to_host && source.device() != target.device()) {
    // The copy starts after the work of both devices, and both go on after it.
    auto ready = make_event();
    record(ready, current_stream(target.device().index()));
    block(ready, stream);
  }
  Ranges reads, writes;
  if (!from_host) reads.push_back(range_of(source));
  if (!to_host) writes.push_back(range_of(target));
  if (pinned) (from_host ? reads : writes).push_back(range_of(*host));
  launch(
      stream, waits ? "copy_waiting" : host != nullptr ? "memcpy" : "copy_",
      [from, to] {
        at::AutoDispatchBelowADInplaceOrView guard;
        to.copy_(from);
      },
      reads, writes);
  if (pinned) record_pinned_use(host->data_ptr(), stream);
  if (!from_host && !to_host && source.device() != target.device()) {
    auto done = make_event();
    record(done, stream);
    block(done, current_stream(target.device().index()));
  }
  if (waits) synchronize_stream(stream, "blocking_copy", to_host ? "to host" : "to device");
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  copy_memory(self.sizes() == target.sizes() ? self : self.expand_as(target), target, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  synchronize_stream(current_stream(self.device().index()), "item", "");
  return on_host(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().mutable_data(), key_of(stream));
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

at::Tensor& set_source(at::Tensor& self, at::Storage storage) {
  int64_t size = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {size}, {});
}

int64_t attention_backend(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return 0; // made of other operators
}

} // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  // An operator may resize a tensor without elements.
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  // Some operators resize what they write to, and back.
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(options)
      .resizeable_storage()
      .allocator(c10::GetAllocator(c10::kCPU))
      .make_tensor();
}

Range range_of(const at::Tensor& tensor) {
  uint64_t span = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    span += static_cast<uint64_t>((tensor.size(dim) - 1) * tensor.stride(dim));
  return {reinterpret_cast<uint64_t>(tensor.data_ptr()), span * tensor.element_size()};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("as_strided", TORCH_FN(as_strided));
  library.impl("_reshape_alias", TORCH_FN(reshape_alias));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Storage", TORCH_FN(set_source));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  library.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  library.impl("_fused_sdp_choice", TORCH_FN(attention_backend));
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

} // namespace sim
