// Streams, events, memory, graphs and a log of a device whose memory is host memory. Uses no header of torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace sim {

constexpr int MOST_DEVICES = 8;

using Task = std::function<void()>;

// Memory from an address on, in bytes.
using Range = std::pair<uint64_t, uint64_t>;
using Ranges = std::vector<Range>;

struct StreamKey {
  int device;
  int64_t id;
  bool operator<(const StreamKey& other) const {
    return device != other.device ? device < other.device : id < other.id;
  }
  bool operator==(const StreamKey& other) const { return device == other.device && id == other.id; }
};

struct Settings {
  // Write down every call.
  bool log = false;
  // Each stream has a thread of its own.
  bool threaded = false;
  // A task waits until this many further ones were launched, or the host waits for the device.
  int lag = 0;
  // The longest random delay of a task, in microseconds.
  int delay = 0;
  // Operators accept tensors of the CPU, as if the device read host memory.
  bool unified = false;
};

// Two, unless a process says otherwise before it uses any.
int device_count();
void set_device_count(int count);

Settings settings();
// Waits for all work first.
void configure(Settings settings);

// Who calls: 0 the program, 1 ddpcheck. Of the calling thread.
int exchange_owner(int owner);

struct LogEntry {
  std::string kind;
  std::string name;
  int device = -1;
  int64_t stream = -1;
  int owner = 0;
  // Identifies an event, and how often it was recorded.
  uint64_t event = 0;
  uint64_t version = 0;
  Ranges reads;
  Ranges writes;
};

void write_log(LogEntry entry);
std::vector<LogEntry> take_log();

int current_device();
int exchange_device(int device);
StreamKey current_stream(int device);
StreamKey exchange_stream(StreamKey stream);
StreamKey new_stream(int device);

// Launch a task on a stream. It runs now, on the thread of the stream, or when the graph under capture is replayed.
void launch(StreamKey stream, const std::string& name, Task task, Ranges reads, Ranges writes);

// Waits; `kind` and `name` are for the log.
void synchronize_stream(StreamKey stream, const std::string& kind, const std::string& name);
void synchronize_device(int device);
bool query_stream(StreamKey stream);

struct Event;
using EventPointer = std::shared_ptr<Event>;
EventPointer make_event();
void record(const EventPointer& event, StreamKey stream);
void block(const EventPointer& event, StreamKey stream);
bool query(const EventPointer& event);
void synchronize(const EventPointer& event);
double elapsed_milliseconds(const EventPointer& begin, const EventPointer& end);

// Of the current stream of `device`.
void* allocate(int device, size_t size);
void release(void* address);
void record_use(void* address, StreamKey stream);
int device_of(const void* address);

void* allocate_pinned(size_t size);
void release_pinned(void* address);
bool is_pinned(const void* address);
// A copy on `stream`, launched before, uses pinned memory.
void record_pinned_use(const void* address, StreamKey stream);

struct Memory {
  int64_t allocated = 0;
  int64_t reserved = 0;
  int64_t peak = 0;
};
Memory memory(int device);

struct Graph;
using GraphPointer = std::shared_ptr<Graph>;
GraphPointer make_graph();
void begin_capture(const GraphPointer& graph, StreamKey stream);
void end_capture(const GraphPointer& graph);
void replay(const GraphPointer& graph, StreamKey stream);
bool is_capturing(StreamKey stream);
// What a capture refuses: raises, and the capture is lost.
void refuse_in_capture(const std::string& what);

// Number of tasks launched so far by an owner.
uint64_t launches(int owner);
// Threads of streams take no more tasks.
void stop();

} // namespace sim
