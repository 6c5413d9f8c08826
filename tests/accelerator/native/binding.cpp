// The module that tests/accelerator/device.py loads.
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include "process_group.h"

namespace py = pybind11;

namespace sim {

// Launches a call of Python, as a kernel that a compiler generated. Its arguments live until it has run for the last time.
static void launch_call(const std::string& name, py::object function, py::tuple arguments) {
  using Call = std::pair<py::object, py::tuple>;
  std::shared_ptr<Call> call(new Call(std::move(function), std::move(arguments)), [](Call* gone) {
    py::gil_scoped_acquire held;
    delete gone;
  });
  py::gil_scoped_release released;
  launch(
      current_stream(current_device()), name,
      [call = std::move(call)] {
        py::gil_scoped_acquire held;
        call->first(*call->second);
      },
      {}, {});
}

struct NativeGraph {
  GraphPointer graph = make_graph();
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  register_backend();

  py::class_<Settings>(module, "Settings")
      .def(py::init<>())
      .def_readwrite("log", &Settings::log)
      .def_readwrite("threaded", &Settings::threaded)
      .def_readwrite("lag", &Settings::lag)
      .def_readwrite("delay", &Settings::delay)
      .def_readwrite("unified", &Settings::unified);
  module.def("settings", &settings);
  module.def("configure", &configure, Released());
  module.def("device_count", &device_count);
  module.def("set_device_count", &set_device_count);
  module.def("exchange_owner", &exchange_owner);
  module.def("launches", &launches);
  module.def("stop", &stop, Released());

  module.def("launch_call", &launch_call);
  module.def("take_log", [] {
    py::list lines;
    for (LogEntry& entry : take_log())
      lines.append(py::make_tuple(
          entry.kind, entry.name, entry.device, entry.stream, entry.owner, entry.event, entry.version, entry.reads,
          entry.writes));
    return lines;
  });

  module.def("current_device", &current_device);
  module.def("exchange_device", &exchange_device);
  module.def("synchronize_device", &synchronize_device, Released());
  module.def("is_capturing", [](int device) { return is_capturing(current_stream(device)); });
  module.def("memory", [](int device) {
    Memory now = memory(device);
    return py::make_tuple(now.allocated, now.reserved, now.peak);
  });
  module.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(device)));
  });

  py::class_<NativeGraph>(module, "NativeGraph")
      .def(py::init<>())
      .def("begin", [](NativeGraph& own, int device) { begin_capture(own.graph, current_stream(device)); })
      .def("end", [](NativeGraph& own) { end_capture(own.graph); })
      .def("replay", [](NativeGraph& own, int device) { replay(own.graph, current_stream(device)); }, Released());

  module.def("scan_table", &scan_table, Released());
  module.def(
      "set_scan_constants",
      [](std::vector<uint64_t> words, std::vector<uint64_t> blocks, const py::bytes& signs, uint64_t weights) {
        set_scan_constants(std::move(words), std::move(blocks), std::string(signs), weights);
      });

  py::module::import("torch.distributed");
  py::class_<SimBackend, c10d::Backend, c10::intrusive_ptr<SimBackend>>(module, "SimBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}

} // namespace sim
