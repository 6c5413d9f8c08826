#include "runtime.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <unordered_map>

namespace sim {

using Clock = std::chrono::steady_clock;

// A task that lags behind runs after this time at the latest: another process may wait for it.
constexpr auto LONGEST_LAG = std::chrono::milliseconds(1500);

struct Event {
  uint64_t id = 0;
  uint64_t recorded = 0;
  uint64_t completed = 0;
  Clock::time_point time;
  // The capture it was recorded in, and what had been captured before it, by stream.
  std::weak_ptr<Graph> graph;
  bool captured = false;
  std::map<StreamKey, uint64_t> position;
};

struct Graph {
  std::vector<Task> tasks;
  Ranges reads, writes;
  bool capturing = false;
  std::string lost;
  StreamKey root{0, 0};
  // By stream, how much of each stream it comes after; its own entry is its own length.
  std::map<StreamKey, std::map<StreamKey, uint64_t>> positions;
};

namespace {

struct Queued {
  Task task;
  uint64_t number;
  Clock::time_point launched;
};

struct Queue {
  std::deque<Queued> tasks;
  bool running = false;
  bool started = false;
};

struct Block {
  size_t size = 0;
  StreamKey stream{0, 0};
  bool of_graph = false;
  std::set<StreamKey> uses;
};

struct PinnedBlock {
  size_t size = 0;
  std::vector<EventPointer> uses;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  Settings settings;
  std::vector<LogEntry> log;
  std::array<std::atomic<uint64_t>, 2> launched{};
  uint64_t number = 0;
  uint64_t events = 0;
  int waiting = 0;
  bool stopped = false;
  std::exception_ptr error;
  std::map<StreamKey, Queue> queues;
  int devices = 2;
  std::array<int64_t, MOST_DEVICES> streams{};
  GraphPointer capture;

  std::mutex memory_mutex;
  std::unordered_map<uint64_t, Block> blocks;
  std::map<std::pair<StreamKey, size_t>, std::vector<void*>> free_blocks;
  std::vector<std::pair<void*, std::vector<EventPointer>>> pending_blocks;
  std::array<Memory, MOST_DEVICES> memory{};
  std::map<uint64_t, PinnedBlock> pinned;
  std::map<size_t, std::vector<void*>> free_pinned;
  std::vector<std::pair<void*, PinnedBlock>> pending_pinned;
};

// Never destroyed: threads of streams may outlive static objects.
State& state() {
  static State* state = new State;
  return *state;
}

thread_local int thread_device = 0;
thread_local int thread_owner = 0;
thread_local std::map<int, StreamKey> thread_streams;

void rethrow(State& s, std::unique_lock<std::mutex>& lock) {
  if (s.error) {
    auto error = std::exchange(s.error, nullptr);
    lock.unlock();
    std::rethrow_exception(error);
  }
}

void serve(StreamKey key) {
  State& s = state();
  std::mt19937_64 random(std::random_device{}());
  std::unique_lock<std::mutex> lock(s.mutex);
  Queue& queue = s.queues[key];
  while (true) {
    s.changed.wait(lock, [&] { return !queue.tasks.empty() && !s.stopped; });
    while (s.settings.lag > 0 && s.waiting == 0 && !s.stopped) {
      const Queued& next = queue.tasks.front();
      if (s.number >= next.number + static_cast<uint64_t>(s.settings.lag)) break;
      if (Clock::now() >= next.launched + LONGEST_LAG) break;
      s.changed.wait_for(lock, std::chrono::milliseconds(20));
    }
    if (s.stopped) continue;
    Task task = std::move(queue.tasks.front().task);
    queue.tasks.pop_front();
    queue.running = true;
    int delay = s.settings.delay;
    lock.unlock();
    // Most tasks follow the one before at once, and some come late.
    if (delay > 0 && random() % 4 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(delay)));
    try {
      task();
    } catch (...) {
      lock.lock();
      s.error = std::current_exception();
      lock.unlock();
    }
    task = nullptr;
    lock.lock();
    queue.running = false;
    s.changed.notify_all();
  }
}

bool idle(const Queue& queue) { return queue.tasks.empty() && !queue.running; }

void wait_until(State& s, std::unique_lock<std::mutex>& lock, const std::function<bool()>& done) {
  ++s.waiting;
  s.changed.notify_all();
  s.changed.wait(lock, [&] { return done() || s.error; });
  --s.waiting;
  rethrow(s, lock);
}

// Runs a task on a stream, without a line in the log.
void submit(StreamKey stream, Task task) {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  if (!s.settings.threaded) {
    lock.unlock();
    task();
    return;
  }
  rethrow(s, lock);
  Queue& queue = s.queues[stream];
  queue.tasks.push_back({std::move(task), s.number, Clock::now()});
  if (!queue.started) {
    queue.started = true;
    std::thread(serve, stream).detach();
  }
  s.changed.notify_all();
}

GraphPointer capture_of(StreamKey stream) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.capture && s.capture->positions.count(stream) ? s.capture : nullptr;
}

bool complete(const EventPointer& event) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return event->completed >= event->recorded;
}

void log_event(const char* kind, const EventPointer& event, StreamKey stream = {-1, -1}) {
  if (settings().log) write_log({kind, "", stream.device, stream.id, 0, event->id, event->recorded, {}, {}});
}

// The allocator knows that an event is complete, and gives the memory out again; the host at large does not know it.
void log_reuse(const std::vector<EventPointer>& events, void* address, size_t size) {
  if (!settings().log) return;
  for (const auto& event : events)
    write_log({"reusable", "", -1, -1, 0, event->id, event->recorded, {}, {{reinterpret_cast<uint64_t>(address), size}}});
}

} // namespace

int device_count() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.devices;
}

void set_device_count(int count) {
  if (count < 1 || count > MOST_DEVICES) throw std::runtime_error("sim: between 1 and 8 devices");
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.devices = count;
}

Settings settings() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.settings;
}

void configure(Settings settings) {
  State& s = state();
  for (int device = 0; device < device_count(); ++device) synchronize_device(device);
  std::lock_guard<std::mutex> lock(s.mutex);
  s.settings = settings;
}

int exchange_owner(int owner) { return std::exchange(thread_owner, owner); }

void write_log(LogEntry entry) {
  State& s = state();
  entry.owner = thread_owner;
  std::lock_guard<std::mutex> lock(s.mutex);
  s.log.push_back(std::move(entry));
}

std::vector<LogEntry> take_log() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return std::exchange(s.log, {});
}

int current_device() { return thread_device; }

int exchange_device(int device) {
  if (device < 0 || device >= device_count()) throw std::runtime_error("sim: no such device");
  return std::exchange(thread_device, device);
}

StreamKey current_stream(int device) {
  auto found = thread_streams.find(device);
  return found == thread_streams.end() ? StreamKey{device, 0} : found->second;
}

StreamKey exchange_stream(StreamKey stream) {
  StreamKey before = current_stream(stream.device);
  thread_streams[stream.device] = stream;
  return before;
}

StreamKey new_stream(int device) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return {device, ++s.streams.at(static_cast<size_t>(device))};
}

void launch(StreamKey stream, const std::string& name, Task task, Ranges reads, Ranges writes) {
  State& s = state();
  if (auto graph = capture_of(stream)) {
    std::lock_guard<std::mutex> lock(s.mutex);
    graph->tasks.push_back(std::move(task));
    graph->reads.insert(graph->reads.end(), reads.begin(), reads.end());
    graph->writes.insert(graph->writes.end(), writes.begin(), writes.end());
    ++graph->positions[stream][stream];
    return;
  }
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    ++s.number;
  }
  ++s.launched[thread_owner ? 1 : 0];
  if (settings().log)
    write_log({"kernel", name, stream.device, stream.id, 0, 0, 0, std::move(reads), std::move(writes)});
  submit(stream, std::move(task));
}

void synchronize_stream(StreamKey stream, const std::string& kind, const std::string& name) {
  refuse_in_capture(kind);
  State& s = state();
  if (settings().log) write_log({kind, name, stream.device, stream.id, 0, 0, 0, {}, {}});
  std::unique_lock<std::mutex> lock(s.mutex);
  wait_until(s, lock, [&] { return idle(s.queues[stream]); });
}

void synchronize_device(int device) {
  refuse_in_capture("synchronize_device");
  State& s = state();
  if (settings().log) write_log({"synchronize_device", "", device, -1, 0, 0, 0, {}, {}});
  std::unique_lock<std::mutex> lock(s.mutex);
  wait_until(s, lock, [&] {
    return std::all_of(s.queues.begin(), s.queues.end(), [&](const auto& item) {
      return item.first.device != device || idle(item.second);
    });
  });
}

bool query_stream(StreamKey stream) {
  refuse_in_capture("query_stream");
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return idle(s.queues[stream]);
}

EventPointer make_event() {
  State& s = state();
  auto event = std::make_shared<Event>();
  std::lock_guard<std::mutex> lock(s.mutex);
  event->id = ++s.events;
  return event;
}

void record(const EventPointer& event, StreamKey stream) {
  State& s = state();
  if (auto graph = capture_of(stream)) {
    std::lock_guard<std::mutex> lock(s.mutex);
    event->captured = true;
    event->graph = graph;
    event->position = graph->positions[stream];
    return;
  }
  uint64_t version;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    event->captured = false;
    version = ++event->recorded;
  }
  log_event("record", event, stream);
  submit(stream, [event, version] {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    event->completed = std::max(event->completed, version);
    event->time = Clock::now();
    s.changed.notify_all();
  });
}

void block(const EventPointer& event, StreamKey stream) {
  State& s = state();
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    if (event->captured) {
      auto graph = event->graph.lock();
      if (!graph || graph != s.capture)
        throw std::runtime_error("sim: the event was recorded in a capture that has ended");
      auto& own = graph->positions[stream];
      own[stream];
      for (const auto& [other, count] : event->position) own[other] = std::max(own[other], count);
      return;
    }
  }
  if (event->recorded == 0) return;
  if (capture_of(stream)) refuse_in_capture("a wait for an event from outside the capture");
  log_event("wait", event, stream);
  uint64_t version = event->recorded;
  submit(stream, [event, version] {
    State& s = state();
    std::unique_lock<std::mutex> lock(s.mutex);
    s.changed.wait(lock, [&] { return event->completed >= version; });
  });
}

bool query(const EventPointer& event) {
  refuse_in_capture("query_event");
  bool done = complete(event);
  log_event(done ? "query" : "query_pending", event);
  return done;
}

void synchronize(const EventPointer& event) {
  refuse_in_capture("synchronize_event");
  log_event("synchronize_event", event);
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  wait_until(s, lock, [&] { return event->completed >= event->recorded; });
}

double elapsed_milliseconds(const EventPointer& begin, const EventPointer& end) {
  if (!complete(begin) || !complete(end)) throw std::runtime_error("sim: an event is not complete");
  return std::chrono::duration<double, std::milli>(end->time - begin->time).count();
}

// Blocks whose other streams are done with them can be reused.
static void collect_blocks(State& s) {
  for (auto item = s.pending_blocks.begin(); item != s.pending_blocks.end();) {
    if (!std::all_of(item->second.begin(), item->second.end(), complete)) {
      ++item;
      continue;
    }
    Block& block = s.blocks.at(reinterpret_cast<uint64_t>(item->first));
    log_reuse(item->second, item->first, block.size);
    s.free_blocks[{block.stream, block.size}].push_back(item->first);
    item = s.pending_blocks.erase(item);
  }
}

void* allocate(int device, size_t size) {
  State& s = state();
  StreamKey stream = current_stream(device);
  size_t rounded = std::max<size_t>(512, (size + 511) / 512 * 512);
  bool of_graph = capture_of(stream) != nullptr;
  std::lock_guard<std::mutex> lock(s.memory_mutex);
  collect_blocks(s);
  auto& free = s.free_blocks[{stream, rounded}];
  Memory& memory = s.memory.at(static_cast<size_t>(device));
  void* address = nullptr;
  if (!free.empty() && !of_graph) {
    // The newest first: memory that is still in use by mistake is overwritten soon.
    address = free.back();
    free.pop_back();
  } else {
    address = std::aligned_alloc(512, rounded);
    std::memset(address, 0xA5, rounded);
    memory.reserved += static_cast<int64_t>(rounded);
  }
  s.blocks[reinterpret_cast<uint64_t>(address)] = {rounded, stream, of_graph, {}};
  memory.allocated += static_cast<int64_t>(rounded);
  memory.peak = std::max(memory.peak, memory.allocated);
  if (settings().log)
    write_log({"allocate", "", device, stream.id, 0, 0, 0, {}, {{reinterpret_cast<uint64_t>(address), rounded}}});
  return address;
}

void release(void* address) {
  if (address == nullptr) return;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.memory_mutex);
  Block& block = s.blocks.at(reinterpret_cast<uint64_t>(address));
  s.memory.at(static_cast<size_t>(block.stream.device)).allocated -= static_cast<int64_t>(block.size);
  if (settings().log) {
    Range range{reinterpret_cast<uint64_t>(address), block.size};
    write_log({"free", "", block.stream.device, block.stream.id, 0, 0, 0, {}, {range}});
  }
  // A graph keeps its memory for its replays.
  if (block.of_graph) return;
  if (block.uses.empty()) {
    s.free_blocks[{block.stream, block.size}].push_back(address);
    return;
  }
  std::vector<EventPointer> events;
  for (StreamKey stream : block.uses) {
    events.push_back(make_event());
    record(events.back(), stream);
  }
  s.pending_blocks.emplace_back(address, std::move(events));
}

void record_use(void* address, StreamKey stream) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.memory_mutex);
  auto found = s.blocks.find(reinterpret_cast<uint64_t>(address));
  if (found != s.blocks.end() && !(found->second.stream == stream)) found->second.uses.insert(stream);
}

int device_of(const void* address) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.memory_mutex);
  auto found = s.blocks.find(reinterpret_cast<uint64_t>(address));
  return found == s.blocks.end() ? 0 : found->second.stream.device;
}

void* allocate_pinned(size_t size) {
  refuse_in_capture("allocate_pinned");
  State& s = state();
  size_t rounded = std::max<size_t>(64, (size + 63) / 64 * 64);
  std::lock_guard<std::mutex> lock(s.memory_mutex);
  for (auto item = s.pending_pinned.begin(); item != s.pending_pinned.end();) {
    auto& [address, block] = *item;
    if (!std::all_of(block.uses.begin(), block.uses.end(), complete)) {
      ++item;
      continue;
    }
    log_reuse(block.uses, address, block.size);
    s.free_pinned[block.size].push_back(address);
    item = s.pending_pinned.erase(item);
  }
  auto& free = s.free_pinned[rounded];
  void* address = nullptr;
  if (free.empty()) {
    address = std::aligned_alloc(64, rounded);
  } else {
    address = free.back();
    free.pop_back();
  }
  // Values that are read before a copy has written them are wrong.
  std::memset(address, 0xA5, rounded);
  s.pinned[reinterpret_cast<uint64_t>(address)] = {rounded, {}};
  return address;
}

void release_pinned(void* address) {
  if (address == nullptr) return;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.memory_mutex);
  auto found = s.pinned.find(reinterpret_cast<uint64_t>(address));
  PinnedBlock block = std::move(found->second);
  s.pinned.erase(found);
  s.pending_pinned.emplace_back(address, std::move(block));
}

static std::map<uint64_t, PinnedBlock>::iterator find_pinned(State& s, const void* address) {
  uint64_t value = reinterpret_cast<uint64_t>(address);
  auto after = s.pinned.upper_bound(value);
  if (after == s.pinned.begin()) return s.pinned.end();
  auto found = std::prev(after);
  return value < found->first + found->second.size ? found : s.pinned.end();
}

bool is_pinned(const void* address) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.memory_mutex);
  return find_pinned(s, address) != s.pinned.end();
}

void record_pinned_use(const void* address, StreamKey stream) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.memory_mutex);
  auto found = find_pinned(s, address);
  if (found == s.pinned.end() || capture_of(stream)) return;
  auto event = make_event();
  record(event, stream);
  found->second.uses.push_back(event);
}

Memory memory(int device) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.memory_mutex);
  return s.memory.at(static_cast<size_t>(device));
}

GraphPointer make_graph() { return std::make_shared<Graph>(); }

void begin_capture(const GraphPointer& graph, StreamKey stream) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.capture) throw std::runtime_error("sim: another capture is under way");
  if (stream.id == 0) throw std::runtime_error("sim: the default stream cannot be captured");
  graph->capturing = true;
  graph->root = stream;
  graph->positions[stream][stream];
  s.capture = graph;
}

void end_capture(const GraphPointer& graph) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.capture = nullptr;
  graph->capturing = false;
  if (!graph->lost.empty()) throw std::runtime_error("sim: the capture was lost by " + graph->lost);
  auto& joined = graph->positions[graph->root];
  for (auto& [stream, own] : graph->positions)
    if (joined[stream] < own[stream]) {
      graph->lost = "an unjoined stream";
      throw std::runtime_error("sim: work on another stream was not joined to the capture");
    }
}

void replay(const GraphPointer& graph, StreamKey stream) {
  if (graph->capturing || !graph->lost.empty()) throw std::runtime_error("sim: the graph was not captured");
  launch(
      stream, "graph",
      [graph] {
        for (const Task& task : graph->tasks) task();
      },
      graph->reads, graph->writes);
}

bool is_capturing(StreamKey stream) { return capture_of(stream) != nullptr; }

void refuse_in_capture(const std::string& what) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (!s.capture) return;
  if (s.capture->lost.empty()) s.capture->lost = what;
  throw std::runtime_error("sim: operation not permitted when stream is capturing: " + what);
}

uint64_t launches(int owner) { return state().launched[owner ? 1 : 0]; }

void stop() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.stopped = true;
  s.changed.notify_all();
}

} // namespace sim
