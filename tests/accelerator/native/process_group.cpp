#include "process_group.h"

namespace sim {

namespace {

using Tensors = SimBackend::Tensors;

Tensors on_host_all(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(on_host(tensor));
  return result;
}

std::vector<Tensors> on_host_lists(const std::vector<Tensors>& lists) {
  std::vector<Tensors> result;
  for (const Tensors& tensors : lists) result.push_back(on_host_all(tensors));
  return result;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors result;
  for (const Tensors& tensors : lists) result.insert(result.end(), tensors.begin(), tensors.end());
  return result;
}

// Complete for the host as soon as it is launched, like work of NCCL: waiting for it makes a stream wait.
class SimWork final : public c10d::Work {
 public:
  SimWork(int rank, c10d::OpType type, Tensors results, EventPointer done, c10::intrusive_ptr<c10::ivalue::Future> future)
      : c10d::Work(rank, type), results_(std::move(results)), done_(std::move(done)), future_(std::move(future)) {}

  bool isCompleted() override { return query(done_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    // The host waits for a barrier.
    if (opType_ == c10d::OpType::BARRIER) sim::synchronize(done_);
    return true;
  }
  void synchronize() override {
    for (int device = 0; device < device_count(); ++device)
      if (uses(device)) block(done_, current_stream(device));
  }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  bool uses(int device) const {
    return std::any_of(results_.begin(), results_.end(), [&](const at::Tensor& tensor) {
      return tensor.device().index() == device;
    });
  }

  Tensors results_;
  EventPointer done_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace

SimBackend::SimBackend(c10::intrusive_ptr<c10d::Backend> inner)
    : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

StreamKey SimBackend::stream(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = streams_.find(device);
  if (found == streams_.end()) found = streams_.emplace(device, new_stream(device)).first;
  return found->second;
}

SimBackend::WorkPointer SimBackend::start(
    c10d::OpType type, const char* name, const Tensors& results, const Tensors& reads, Collective collective) {
  int device = !results.empty() ? results[0].device().index()
      : !reads.empty()          ? reads[0].device().index()
                                : current_device();
  StreamKey own = stream(device);
  auto ready = make_event();
  record(ready, current_stream(device));
  block(ready, own);
  Ranges read, written;
  for (const at::Tensor& tensor : reads)
    if (tensor.numel() > 0) read.push_back(range_of(tensor));
  for (const at::Tensor& tensor : results)
    if (tensor.numel() > 0) written.push_back(range_of(tensor));
  // Memory of a collective that nobody waits for must not be reused before it has run.
  for (const Tensors& tensors : {results, reads})
    for (const at::Tensor& tensor : tensors) record_use(tensor.storage().mutable_data(), own);
  auto inner = inner_;
  launch(own, name, [inner, collective] { collective(*inner)->wait(); }, read, written);
  auto done = make_event();
  record(done, own);
  c10::Stream before = stream_of(exchange_stream(own));
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_at(device)});
  future->markCompleted(at::IValue(results));
  exchange_stream(key_of(before));
  return c10::make_intrusive<SimWork>(getRank(), type, results, done, future);
}

SimBackend::WorkPointer SimBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto host = on_host_all(tensors);
  return start(c10d::OpType::BROADCAST, "broadcast", tensors, {}, [host, options](c10d::Backend& inner) mutable {
    return inner.broadcast(host, options);
  });
}

SimBackend::WorkPointer SimBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto host = on_host_all(tensors);
  return start(c10d::OpType::ALLREDUCE, "allreduce", tensors, {}, [host, options](c10d::Backend& inner) mutable {
    return inner.allreduce(host, options);
  });
}

SimBackend::WorkPointer SimBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto host = on_host_all(tensors);
  return start(c10d::OpType::ALLREDUCE, "allreduce", tensors, {}, [host, options](c10d::Backend& inner) mutable {
    return inner.allreduce_coalesced(host, options);
  });
}

SimBackend::WorkPointer SimBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto host = on_host_all(tensors);
  return start(c10d::OpType::REDUCE, "reduce", tensors, {}, [host, options](c10d::Backend& inner) mutable {
    return inner.reduce(host, options);
  });
}

SimBackend::WorkPointer SimBackend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto to = on_host_lists(outputs);
  auto from = on_host_all(inputs);
  return start(
      c10d::OpType::ALLGATHER, "allgather", flat(outputs), inputs, [to, from, options](c10d::Backend& inner) mutable {
        return inner.allgather(to, from, options);
      });
}

SimBackend::WorkPointer SimBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  auto to = on_host(output), from = on_host(input);
  return start(
      c10d::OpType::_ALLGATHER_BASE, "allgather", {output}, {input}, [to, from, options](c10d::Backend& inner) mutable {
        return inner._allgather_base(to, from, options);
      });
}

SimBackend::WorkPointer SimBackend::gather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  auto to = on_host_lists(outputs);
  auto from = on_host_all(inputs);
  return start(
      c10d::OpType::GATHER, "gather", flat(outputs), inputs, [to, from, options](c10d::Backend& inner) mutable {
        return inner.gather(to, from, options);
      });
}

SimBackend::WorkPointer SimBackend::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  auto to = on_host_all(outputs);
  auto from = on_host_lists(inputs);
  return start(
      c10d::OpType::SCATTER, "scatter", outputs, flat(inputs), [to, from, options](c10d::Backend& inner) mutable {
        return inner.scatter(to, from, options);
      });
}

SimBackend::WorkPointer SimBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  auto to = on_host_all(outputs);
  auto from = on_host_lists(inputs);
  return start(
      c10d::OpType::REDUCE_SCATTER, "reduce_scatter", outputs, flat(inputs),
      [to, from, options](c10d::Backend& inner) mutable { return inner.reduce_scatter(to, from, options); });
}

SimBackend::WorkPointer SimBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  auto to = on_host(output), from = on_host(input);
  return start(
      c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", {output}, {input},
      [to, from, options](c10d::Backend& inner) mutable { return inner._reduce_scatter_base(to, from, options); });
}

SimBackend::WorkPointer SimBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  auto to = on_host(output), from = on_host(input);
  return start(
      c10d::OpType::ALLTOALL_BASE, "alltoall", {output}, {input},
      [to, from, output_sizes, input_sizes, options](c10d::Backend& inner) mutable {
        return inner.alltoall_base(to, from, output_sizes, input_sizes, options);
      });
}

SimBackend::WorkPointer SimBackend::send(Tensors& tensors, int target, int tag) {
  auto host = on_host_all(tensors);
  return start(c10d::OpType::SEND, "send", {}, tensors, [host, target, tag](c10d::Backend& inner) mutable {
    return inner.send(host, target, tag);
  });
}

SimBackend::WorkPointer SimBackend::recv(Tensors& tensors, int source, int tag) {
  auto host = on_host_all(tensors);
  return start(c10d::OpType::RECV, "recv", tensors, {}, [host, source, tag](c10d::Backend& inner) mutable {
    return inner.recv(host, source, tag);
  });
}

SimBackend::WorkPointer SimBackend::barrier(const c10d::BarrierOptions& options) {
  return start(c10d::OpType::BARRIER, "barrier", {}, {}, [options](c10d::Backend& inner) {
    return inner.barrier(options);
  });
}

} // namespace sim
