// A simulated accelerator for tests, as a PrivateUse1 backend called "sim".
//
// * Device memory is one memfd per device, mapped twice: tensors hold addresses of a PROT_NONE
//   mapping (host access faults), kernels use the readable one.
// * Streams are lazy: a non-blocking copy between pinned and device memory runs only when something
//   forces it (a kernel behind it in its stream, an event, a sync). Whoever does not wait sees old
//   bytes, every time.
// * Kernels (all other ops) run at once on the host, by the CPU's kernels, after their stream.
// * Freed memory of which a stream was recorded counts until the host has waited for that stream:
//   so late may a device be.
// * Vector clocks per stream and one for the host report accesses of the same bytes by two streams
//   that nothing orders, also through the caching allocator's reuse of freed blocks.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unordered_map>

namespace sim {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr size_t ARENA = size_t(32) << 30;

int num_devices() {
  static int n = [] {
    auto* v = getenv("SIM_DEVICES");
    return v ? atoi(v) : 2;
  }();
  return n;
}
bool lazy() {
  static bool on = [] {
    auto* v = getenv("SIM_LAZY");
    return !v || atoi(v);
  }();
  return on;
}

std::recursive_mutex everything;
using Lock = std::lock_guard<std::recursive_mutex>;
bool has_begun = false;

// ---- clocks, streams, events --------------------------------------------------------------------
using Clock = std::vector<uint64_t>;
void join(Clock& a, const Clock& b) {
  if (a.size() < b.size()) a.resize(b.size());
  for (size_t i = 0; i < b.size(); i++) a[i] = std::max(a[i], b[i]);
}
uint64_t at(const Clock& a, size_t i) { return i < a.size() ? a[i] : 0; }

// A clock counts, for each stream, what is known to be over. A stream's own is what comes before
// its next kernel; the host's is what the host has waited for.
struct StreamState;
struct Task {  // of a stream: a copy, or the wait for another stream's task `seq`
  std::function<void()> run;
  StreamState* after = nullptr;
  uint64_t seq = 0;
};
struct StreamState {
  int dev, index;
  StreamId id;
  std::deque<Task> tasks;        // that nothing has forced yet
  uint64_t asked = 0, done = 0;  // tasks, by number
  Clock clock;
};
struct EventState {
  StreamState* s = nullptr;
  uint64_t seq = 0;
  Clock clock;
  double t = 0;
};
Clock host;
std::vector<std::unique_ptr<StreamState>> all_streams;
std::map<std::pair<int, StreamId>, StreamState*> by_id;
std::atomic<int64_t> next_id{1};

StreamState* stream_of(int dev, StreamId id) {
  Lock lock(everything);
  auto& s = by_id[{dev, id}];
  if (!s) {
    all_streams.push_back(std::make_unique<StreamState>());
    s = all_streams.back().get();
    s->dev = dev;
    s->id = id;
    s->index = int(all_streams.size()) - 1;
  }
  return s;
}
void run_until(StreamState* s, uint64_t seq) {
  Lock lock(everything);
  while (s->done < seq && !s->tasks.empty()) {
    Task t = std::move(s->tasks.front());
    s->tasks.pop_front();
    if (t.after) run_until(t.after, t.seq);
    if (t.run) t.run();
    s->done++;
  }
}
void sync_stream(StreamState* s) {
  Lock lock(everything);
  run_until(s, s->asked);
  join(host, s->clock);
}
void sync_device(int dev) {
  Lock lock(everything);
  for (size_t i = 0; i < all_streams.size(); i++)
    if (all_streams[i]->dev == dev) sync_stream(all_streams[i].get());
}

thread_local int cur_dev = 0;
thread_local std::map<int, StreamId> cur_stream;
std::set<int> used_devices;  // those a context was made on
void touch(int d) {
  Lock lock(everything);
  used_devices.insert(d);
}
StreamState* current(int dev) {
  auto it = cur_stream.find(dev);
  return stream_of(dev, it == cur_stream.end() ? 0 : it->second);
}

// ---- memory -------------------------------------------------------------------------------------
struct Access {
  size_t lo, hi;
  int stream;
  uint64_t epoch;
  bool write;
  std::string what;
};
struct Block {
  uintptr_t base;
  size_t size, wanted;
  int dev;
  StreamState* owner;  // dev -1: pinned host
  std::set<StreamState*> users;
  // Of the device's memory, what the host has to have waited for; of the host's, tasks by number.
  std::vector<std::pair<StreamState*, uint64_t>> until;
  std::vector<Access> accesses;
};
struct Arena {
  char* dev = nullptr;
  char* real = nullptr;
  int fd = -1;
  size_t used = 0;
  int64_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0;
};
std::vector<Arena> arenas;
std::map<uintptr_t, Block*> blocks;  // by base
std::map<std::tuple<int, StreamState*, size_t>, std::vector<Block*>> idle;
std::vector<Block*> limbo;
std::vector<Block*> idle_host;
int64_t host_allocated = 0;
std::set<uintptr_t> registered;  // by host_register
std::vector<std::string> lost;

void init_arenas() {
  Lock lock(everything);
  if (!arenas.empty()) return;
  arenas.resize(num_devices());
  for (auto& a : arenas) {
    a.fd = memfd_create("simdev", 0);
    TORCH_CHECK(a.fd >= 0 && ftruncate(a.fd, ARENA) == 0, "sim: no device memory");
    a.real =
        (char*)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, a.fd, 0);
    a.dev =
        (char*)mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(a.real != MAP_FAILED && a.dev != MAP_FAILED, "sim: no address space");
  }
}
char* real_of(const void* p, int dev) {
  return p ? arenas[dev].real + ((char*)p - arenas[dev].dev) : nullptr;
}
Block* block_of(const void* p) {
  auto it = blocks.upper_bound((uintptr_t)p);
  if (it == blocks.begin()) return nullptr;
  Block* b = std::prev(it)->second;
  return (uintptr_t)p < b->base + b->size ? b : nullptr;
}
size_t rounded(size_t n) { return std::max<size_t>(512, (n + 511) / 512 * 512); }
bool finished(Block* b) {
  for (auto& [s, q] : b->until)
    if ((b->dev < 0 ? s->done : at(host, s->index)) < q) return false;
  return true;
}
// Freed memory of which other streams were recorded counts, and is not used again, until they have
// passed. A device may be as late as the host lets it: they have where the host has waited for them.
void reclaim() {
  for (size_t i = 0; i < limbo.size(); i++)
    if (finished(limbo[i])) {
      Block* b = limbo[i];
      limbo.erase(limbo.begin() + i--);
      b->until.clear();
      arenas[b->dev].allocated -= b->size;
      // the allocator has queried the events: ordered
      for (auto& x : b->accesses) {
        Clock v(x.stream + 1);
        v[x.stream] = x.epoch;
        join(b->owner->clock, v);
      }
      idle[{b->dev, b->owner, b->size}].push_back(b);
    }
}
Block* alloc_device(size_t n, int dev) {
  init_arenas();
  touch(dev);
  Lock lock(everything);
  size_t size = rounded(n);
  StreamState* s = current(dev);
  reclaim();
  auto& free = idle[{dev, s, size}];
  Block* b;
  auto& a = arenas[dev];
  if (!free.empty()) {
    b = free.back();
    free.pop_back();
  } else {
    size_t room = (size + 4095) / 4096 * 4096;
    if (a.used + room > ARENA && !limbo.empty()) {  // as CUDA, before it gives up
      sync_device(dev);
      reclaim();
    }
    TORCH_CHECK(a.used + room <= ARENA, "sim: out of device memory");
    b = new Block{(uintptr_t)a.dev + a.used, size, n, dev, s, {}, {}, {}};
    a.used += room;
    a.reserved += room;
    a.peak_reserved = std::max(a.peak_reserved, a.reserved);
    blocks[b->base] = b;
    memset(real_of((void*)b->base, dev), 0xCB, size);
  }
  b->wanted = n;
  a.allocated += size;
  a.peak = std::max(a.peak, a.allocated);
  return b;
}
void free_device(void* ctx) {
  Lock lock(everything);
  Block* b = (Block*)ctx;
  if (b->users.empty()) {
    arenas[b->dev].allocated -= b->size;
    idle[{b->dev, b->owner, b->size}].push_back(b);
    return;
  }
  for (auto* s : b->users) b->until.emplace_back(s, at(s->clock, s->index));
  b->users.clear();
  limbo.push_back(b);
}
Block* alloc_host(size_t n) {
  init_arenas();
  Lock lock(everything);
  size_t size = 4096;
  while (size < n) size *= 2;  // as CUDA's host allocator does
  for (size_t i = 0; i < idle_host.size(); i++)
    if (idle_host[i]->size == size && finished(idle_host[i])) {
      Block* b = idle_host[i];
      idle_host.erase(idle_host.begin() + i);
      b->until.clear();
      b->accesses.clear();
      return b;
    }
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(p != MAP_FAILED, "sim: out of host memory");
  Block* b = new Block{(uintptr_t)p, size, n, -1, nullptr, {}, {}, {}};
  host_allocated += size;
  return blocks[b->base] = b;
}
void free_host(void* ctx) {
  Lock lock(everything);
  Block* b = (Block*)ctx;
  for (auto* s : b->users) b->until.emplace_back(s, s->asked);
  b->users.clear();
  idle_host.push_back(b);
}

// Memory of the caller's that is page-locked in place; the numbers are those of CUDA's errors.
int host_register(uintptr_t p, size_t n) {
  touch(cur_dev);
  Lock lock(everything);
  size_t low = p / 4096 * 4096, high = (p + n + 4095) / 4096 * 4096;
  for (auto& [base, b] : blocks)
    if (b->dev < 0 && base < high && low < base + b->size) return 712;
  auto* b = new Block{p, n, n, -1, nullptr, {}, {}, {}};
  registered.insert(p);
  blocks[p] = b;
  return 0;
}
int host_unregister(uintptr_t p) {
  Lock lock(everything);
  if (!registered.erase(p)) return 713;
  Block* b = blocks[p];
  for (auto* s : b->users)
    if (s->done < s->asked) lost.push_back("page-locked memory was released with a copy in flight");
  blocks.erase(p);
  delete b;
  return 0;
}

// ---- races --------------------------------------------------------------------------------------
std::vector<std::string> found;
std::vector<std::string> reports;
thread_local std::vector<std::string> pending;
std::string label(StreamState* s) {
  return "sim:" + std::to_string(s->dev) + "/stream" + std::to_string(s->id);
}
void access(StreamState* s, uint64_t epoch, const void* p, size_t n, bool write,
            const std::string& what) {
  if (!n) return;
  Block* b = block_of(p);
  if (!b) return;
  if (b->dev >= 0 && b->dev != s->dev && !what.starts_with("copy"))
    pending.push_back("memory of sim:" + std::to_string(b->dev) + " used by " + what + " on " +
                      label(s));
  size_t lo = (uintptr_t)p - b->base, hi = lo + n;
  std::vector<Access> rest;
  for (auto& x : b->accesses) {
    bool overlap = x.lo < hi && lo < x.hi,
         ordered = x.stream == s->index || x.epoch <= at(s->clock, x.stream);
    if (overlap && (write || x.write) && !ordered)
      pending.push_back(std::string(write ? "write" : "read") + " by " + what + " on " + label(s) +
                        " of " + (b->dev < 0 ? "pinned host" : "device") + " bytes [" +
                        std::to_string(lo) + "," + std::to_string(hi) + ") of a block of " +
                        std::to_string(b->wanted) + ", not ordered behind the " +
                        (x.write ? "write" : "read") + " by " + x.what + " on " +
                        label(all_streams[x.stream].get()));
    bool covered = x.lo >= lo && x.hi <= hi && (write || (x.stream == s->index && !x.write));
    if (!covered) rest.push_back(std::move(x));
  }
  if (rest.size() > 256) rest.erase(rest.begin());
  rest.push_back({lo, hi, s->index, epoch, write, what});
  b->accesses = std::move(rest);
}
void report() {
  if (pending.empty()) return;
  auto mine = std::move(pending);
  pending.clear();
  std::string stack;
  {
    pybind11::gil_scoped_acquire gil;
    try {
      auto lines = pybind11::module_::import("traceback").attr("format_stack")();
      auto all = lines.cast<std::vector<std::string>>();
      for (size_t i = all.size() > 9 ? all.size() - 9 : 0; i < all.size(); i++) stack += all[i];
    } catch (pybind11::error_already_set& e) {
      e.restore();
      PyErr_Clear();
    }
  }
  Lock lock(everything);
  for (auto& m : mine) reports.push_back(m + "\n" + stack);
}
uint64_t launch(StreamState* s) {
  join(s->clock, host);
  if ((int)s->clock.size() <= s->index) s->clock.resize(s->index + 1);
  return ++s->clock[s->index];
}

// ---- guard --------------------------------------------------------------------------------------
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  Device getDevice() const override { return Device(TYPE, cur_dev); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() >= 0 && d.index() < num_devices(), "sim: no device ", int(d.index()));
    cur_dev = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) cur_dev = d.index();
  }
  Device exchangeDevice(Device d) const override {
    auto old = getDevice();
    if (d.index() >= 0) setDevice(d);
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  static int where(Device d) { return d.index() < 0 ? cur_dev : d.index(); }
  Stream getStream(Device d) const override {
    auto* s = current(where(d));
    return wrap(s);
  }
  static Stream wrap(StreamState* s) { return Stream(Stream::UNSAFE, Device(TYPE, s->dev), s->id); }
  Stream getDefaultStream(Device d) const override { return wrap(stream_of(where(d), 0)); }
  Stream getNewStream(Device d, int) const override {
    touch(where(d));
    return wrap(stream_of(where(d), next_id++));
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    cur_stream[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return of(s); }
  static StreamState* of(const Stream& s) { return stream_of(s.device_index(), s.id()); }
  void record(void** e, const Stream& s, const DeviceIndex index,
              const c10::EventFlag) const override {
    Lock lock(everything);
    touch(s.device_index());
    touch(cur_dev);  // CUDA goes back to it by a call that makes a context
    TORCH_CHECK(index == -1 || index == s.device_index(), "Event device index ", int(index),
                " does not match recording stream's device index ", int(s.device_index()));
    if (!*e) *e = new EventState;
    auto* ev = (EventState*)*e;
    auto* st = of(s);
    launch(st);
    ev->s = st;
    ev->seq = st->asked;
    ev->clock = st->clock;
    ev->t = std::chrono::duration<double, std::milli>(
                std::chrono::steady_clock::now().time_since_epoch())
                .count();
  }
  void block(void* e, const Stream& s) const override {
    Lock lock(everything);
    if (!e) return;
    touch(cur_dev);  // as `record`
    auto* ev = (EventState*)e;
    auto* st = of(s);
    join(st->clock, ev->clock);
    if (ev->s != st) {
      st->tasks.push_back({nullptr, ev->s, ev->seq});
      st->asked++;
    }
  }
  bool queryEvent(void* e) const override {
    Lock lock(everything);
    if (!e) return true;
    auto* ev = (EventState*)e;
    bool was = ev->s->done >= ev->seq;
    run_until(ev->s, ev->seq);
    if (was) join(host, ev->clock);
    return was;
  }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (EventState*)e; }
  bool queryStream(const Stream& s) const override {
    Lock lock(everything);
    auto* st = of(s);
    bool was = st->done >= st->asked;
    run_until(st, st->asked);
    return was;
  }
  void synchronizeStream(const Stream& s) const override { sync_stream(of(s)); }
  void synchronizeEvent(void* e) const override {
    Lock lock(everything);
    if (!e) return;
    auto* ev = (EventState*)e;
    run_until(ev->s, ev->seq);
    join(host, ev->clock);
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    touch(d);
    touch(cur_dev);  // as `record`
    sync_device(d);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override {
    Lock lock(everything);
    auto* b = (Block*)p.get_context();
    if (b && b->owner != of(s)) b->users.insert(of(s));
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    return ((EventState*)b)->t - ((EventState*)a)->t;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- allocators ---------------------------------------------------------------------------------
void copy_bytes(void* dst, const void* src, size_t n);
struct DevAlloc final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &c10::detail::deleteNothing, Device(TYPE, cur_dev)};
    auto* b = alloc_device(n, cur_dev);
    return {(void*)b->base, b, &free_device, Device(TYPE, cur_dev)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, size_t n) const override { copy_bytes(d, s, n); }
  bool initialized() override { return has_begun; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& p, Stream s) override {
    Guard().recordDataPtrOnStream(p, s);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    Lock lock(everything);
    init_arenas();
    reclaim();
    c10::CachingDeviceAllocator::DeviceStats st;
    auto& a = arenas[d];
    for (auto* x : {&st.allocated_bytes, &st.active_bytes, &st.requested_bytes}) {
      (*x)[0].current = a.allocated;
      (*x)[0].peak = a.peak;
    }
    st.reserved_bytes[0].current = a.reserved;
    st.reserved_bytes[0].peak = a.peak_reserved;
    return st;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override {
    Lock lock(everything);
    init_arenas();
    reclaim();
    arenas[d].peak = arenas[d].allocated;
    arenas[d].peak_reserved = arenas[d].reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    Lock lock(everything);
    init_arenas();
    return {ARENA - arenas[d].used, ARENA};
  }
};
DevAlloc dev_alloc;
struct HostAlloc final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &c10::detail::deleteNothing, Device(at::kCPU)};
    auto* b = alloc_host(n);
    return {(void*)b->base, b, &free_host, Device(at::kCPU)};
  }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(d, s, n); }
  bool record_event(void* p, void*, Stream s) override {
    Lock lock(everything);
    auto* b = block_of(p);
    if (!b) return false;
    b->users.insert(Guard::of(s));
    return true;
  }
  void empty_cache() override {
    Lock lock(everything);
    for (auto* b : idle_host) {
      if (!finished(b))
        for (auto& [s, q] : b->until) run_until(s, q);
      munmap((void*)b->base, b->size);
      host_allocated -= b->size;
      blocks.erase(b->base);
      delete b;
    }
    idle_host.clear();
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAlloc host_alloc;
bool is_pinned(const void* p) {
  Lock lock(everything);
  auto* b = block_of(p);
  return b && b->dev < 0;
}

// ---- generator: a seed and a count, 16 bytes as CUDA's
// ---------------------------------------------
struct Gen final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, count_ = 0;
  explicit Gen(int d)
      : c10::GeneratorImpl(Device(TYPE, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t s) override {
    seed_ = s;
    count_ = 0;
  }
  void set_offset(uint64_t o) override { count_ = o; }
  uint64_t get_offset() const override { return count_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    auto s = c10::detail::getNonDeterministicRandom();
    set_current_seed(s);
    return s;
  }
  void set_state(const c10::TensorImpl& t) override {
    TORCH_CHECK(t.numel() == 16 && t.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "RNG state is wrong size");
    memcpy(&seed_, t.data(), 8);
    memcpy(&count_, (char*)t.data() + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, at::kByte);
    memcpy(t.data_ptr(), &seed_, 8);
    memcpy((char*)t.data_ptr() + 8, &count_, 8);
    return t.getIntrusivePtr();
  }
  Gen* clone_impl() const override {
    auto* g = new Gen(device().index());
    g->seed_ = seed_;
    g->count_ = count_;
    return g;
  }
  at::Generator next() {  // a CPU generator for one kernel
    auto g = at::detail::createCPUGenerator(seed_ * 0x9E3779B97F4A7C15ULL +
                                            (++count_) * 0xD1B54A32D192ED03ULL);
    return g;
  }
};
std::vector<at::Generator>& gens() {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> v;
    for (int i = 0; i < num_devices(); i++) v.push_back(at::make_generator<Gen>(i));
    return v;
  }();
  return all;
}

// ---- hooks --------------------------------------------------------------------------------------
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  void init() const override {
    init_arenas();
    has_begun = true;
  }
  bool hasPrimaryContext(DeviceIndex d) const override {
    Lock lock(everything);
    return used_devices.count(d);
  }
  DeviceIndex deviceCount() const override { return num_devices(); }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice(Device(TYPE, d)); }
  DeviceIndex getCurrentDevice() const override { return cur_dev; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = cur_dev;
    if (d >= 0) cur_dev = d;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_alloc; }
  Device getDeviceFromPtr(void* p) const override {
    Lock lock(everything);
    auto* b = block_of(p);
    TORCH_CHECK(b && b->dev >= 0, "sim: not device memory");
    return Device(TYPE, b->dev);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override {
    return gens().at(d < 0 ? cur_dev : d);
  }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<Gen>(d < 0 ? cur_dev : d);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::OptionalDeviceGuard g(storage.device());
    auto fresh = dev_alloc.allocate(n);
    if (n && storage.nbytes())
      copy_bytes(fresh.get(), storage.data(), std::min(n, storage.nbytes()));
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(n);
  }
};

// ---- tensors ------------------------------------------------------------------------------------
int dev_of(const at::Tensor& t) { return t.device().index() < 0 ? cur_dev : t.device().index(); }
at::Tensor on_host(const at::Tensor& t,
                   std::unordered_map<c10::StorageImpl*, c10::Storage>* seen = nullptr) {
  auto* si = t.storage().unsafeGetStorageImpl();
  c10::Storage st;
  if (seen && seen->count(si))
    st = seen->at(si);
  else {
    st = c10::Storage(c10::Storage::use_byte_size_t(), si->nbytes(),
                      c10::DataPtr(real_of(si->data(), dev_of(t)), Device(at::kCPU)), nullptr,
                      false);
    if (seen) (*seen)[si] = st;
  }
  auto r = at::detail::make_tensor<c10::TensorImpl>(
      std::move(st), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  r.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    r.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (t.is_conj()) r._set_conj(true);
  if (t.is_neg()) r._set_neg(true);
  return r;
}
std::pair<const void*, size_t> extent(const at::Tensor& t) {
  if (!t.numel()) return {nullptr, 0};
  size_t n = 1;
  for (int64_t i = 0; i < t.dim(); i++) n += (t.size(i) - 1) * t.stride(i);
  return {(const char*)t.storage().data() + t.storage_offset() * t.itemsize(), n * t.itemsize()};
}
void touch_tensor(StreamState* s, uint64_t e, const at::Tensor& t, bool w,
                  const std::string& what) {
  auto [p, n] = extent(t);
  if (n) access(s, e, p, n, w, what);
}
at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dt,
                 std::optional<at::Layout>, std::optional<Device> d, std::optional<bool>,
                 std::optional<at::MemoryFormat> mf) {
  c10::OptionalDeviceGuard g(d.value_or(Device(TYPE, cur_dev)));
  if (d && d->index() < 0) g.reset_device(Device(TYPE, cur_dev));
  at::globalContext().lazyInitDevice(TYPE);  // before that, no memory counts as pinned
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &dev_alloc,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dt), mf);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dt, std::optional<at::Layout>,
                         std::optional<Device> d, std::optional<bool>) {
  c10::OptionalDeviceGuard g;
  if (d && d->index() >= 0) g.reset_device(*d);
  init_arenas();
  return at::detail::empty_strided_generic(size, stride, &dev_alloc,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dt));
}
void push(StreamState* s, std::function<void()> f) {
  s->tasks.push_back({std::move(f)});
  s->asked++;
  if (!lazy()) run_until(s, s->asked);
}
void copy_bytes(void* dst, const void* src, size_t n) {  // device to device, in the current stream
  Lock lock(everything);
  Block *a = block_of(dst), *b = block_of(src);
  auto* s = current(a->dev);
  auto e = launch(s);
  access(s, e, src, n, false, "copy_bytes");
  access(s, e, dst, n, true, "copy_bytes");
  char *d = real_of(dst, a->dev), *r = real_of(src, b->dev);
  push(s, [=] { memcpy(d, r, n); });
}
bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}
// The rules of CUDA's copy: asynchronous from and to pinned memory where non_blocking, and where no
// temporary is needed; a copy from pageable memory has taken the bytes when it returns.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst0, bool non_blocking) {
  at::Tensor dst = dst0, src = self;
  if (src.sizes() != dst.sizes()) src = src.expand(dst.sizes());
  if (!dst.numel()) return dst0;
  bool sd = src.device().type() == TYPE, dd = dst.device().type() == TYPE;
  TORCH_CHECK(sd || dd, "sim: copy without a device");
  int dev = sd ? dev_of(src) : dev_of(dst);
  touch(dev);
  if (sd != dd &&
      !same_layout(
          src, dst)) {  // as CUDA: first alike on the side of the device or host, then the bytes
    if (dd) {
      auto c = dst.dtype() == src.dtype()
                   ? src.contiguous()
                   : src.to(dst.scalar_type()).contiguous();  // CUDA casts on the host for H2D
      if (dst.is_contiguous()) return copy_from(c, dst, non_blocking), dst0;
      auto t = at::empty(dst.sizes(), dst.options());
      copy_from(c, t, non_blocking);
      copy_from(t, dst, non_blocking);
    } else {
      auto t = src.contiguous();
      if (t.dtype() != dst.dtype()) t = t.to(dst.scalar_type());
      if (dst.is_contiguous()) return copy_from(t, dst, non_blocking), dst0;
      auto h = at::empty(dst.sizes(), dst.options());
      copy_from(t, h, false);
      dst.copy_(h);
    }
    return dst0;
  }
  {
    Lock lock(everything);
    auto* s = current(dev);
    auto e = launch(s);
    touch_tensor(s, e, src, false, "copy");
    touch_tensor(s, e, dst, true, "copy");
    if (sd && dd && dev_of(src) != dev_of(dst)) {  // both streams wait for each other, as CUDA does
      auto* o = current(dev_of(dst));
      auto e2 = launch(o);
      (void)e2;
      run_until(o, o->asked);
      join(s->clock, o->clock);
      run_until(s, s->asked);
      on_host(dst).copy_(on_host(src));
      join(o->clock, s->clock);
      touch_tensor(o, launch(o), dst, true, "copy");
    } else if (sd && dd) {
      auto a = on_host(dst), b = on_host(src);
      run_until(s, s->asked);
      a.copy_(b);
    } else {
      auto [hp, n] = extent(sd ? dst : src);
      auto [dp, n2] = extent(sd ? src : dst);
      char* real = real_of(dp, dev);
      char* hostp = (char*)hp;
      bool pinned = is_pinned(hp);
      if (pinned)
        if (auto* b = block_of(hp)) b->users.insert(s);
      if (non_blocking && pinned) {
        push(
            s, sd ? std::function<void()>([=] { memcpy(hostp, real, n); })
                  : [=] { memcpy(real, hostp, n); });
      } else if (!sd && non_blocking) {  // pageable: staged now, lands later
        auto bytes = std::make_shared<std::string>(hostp, n);
        push(s, [=] { memcpy(real, bytes->data(), bytes->size()); });
      } else {
        run_until(s, s->asked);
        if (sd)
          memcpy(hostp, real, n);
        else
          memcpy(real, hostp, n);
        join(host, s->clock);
      }
    }
  }
  report();
  return dst0;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) at::native::resize_output(dst, self.sizes());
  return copy_from(self, dst, false);
}
const at::Tensor& resize_(const at::Tensor& t, c10::SymIntArrayRef size0,
                          std::optional<at::MemoryFormat> mf) {
  auto size = C10_AS_INTARRAYREF_SLOW(size0);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (mf && *mf != at::MemoryFormat::Contiguous && *mf != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*mf);
  size_t need = (t.storage_offset() + t.numel()) * t.itemsize();
  if (t.storage().nbytes() < need) Hooks().resizePrivateUse1Bytes(t.storage(), need);
  return t;
}
at::Tensor& set_storage(at::Tensor& t, c10::Storage s, c10::SymInt off, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(s));
  impl->set_storage_offset(off.expect_int());
  auto sz = C10_AS_INTARRAYREF_SLOW(size);
  auto st = C10_AS_INTARRAYREF_SLOW(stride);
  if (st.empty() && !sz.empty())
    impl->set_sizes_contiguous(sz);
  else
    impl->set_sizes_and_strides(sz, st);
  return t;
}
at::Tensor& set_whole(at::Tensor& t, c10::Storage s) {
  int64_t n = s.nbytes() / t.itemsize();
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(s));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({n});
  return t;
}
bool shallow(const at::Tensor&, const at::Tensor&) { return true; }
void record_stream(at::Tensor& t, Stream s) { dev_alloc.recordStream(t.storage().data_ptr(), s); }
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef a, c10::SymIntArrayRef b,
                      std::optional<c10::SymInt> o) {
  return at::native::as_strided_tensorimpl(
      t, C10_AS_INTARRAYREF_SLOW(a), C10_AS_INTARRAYREF_SLOW(b),
      o ? std::optional<int64_t>(o->expect_int()) : std::nullopt);
}
at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(a), C10_AS_INTARRAYREF_SLOW(b));
}

// Any other op: the CPU's kernel on the device's memory.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  const size_t n = schema.arguments().size(), begin = stack->size() - n;
  int dev = -1;
  std::unordered_map<c10::TensorImpl*, at::Tensor> back;     // alias -> tensor
  std::unordered_map<c10::StorageImpl*, at::Tensor> owners;  // storage of an alias -> a tensor
  std::unordered_map<c10::StorageImpl*, c10::Storage> seen;
  std::vector<std::pair<at::Tensor, bool>> used;
  std::vector<std::pair<at::Tensor, at::Tensor>> grown;
  auto turn = [&](const at::Tensor& t, bool write) -> at::Tensor {
    if (!t.defined() || t.device().type() != TYPE) return t;
    if (dev < 0) dev = dev_of(t);
    TORCH_CHECK(
        dev == dev_of(t) || t.dim() == 0,
        "Expected all tensors to be on the same device, but found at least two devices, sim:", dev,
        " and sim:", dev_of(t), "! (", name, ")");
    used.emplace_back(t, write);
    at::Tensor a;
    if (write && !t.numel()) {
      a = at::empty({0}, t.options().device(at::kCPU));
      a.resize_(t.sizes());
      grown.emplace_back(a, t);
    } else {
      a = on_host(t, &seen);
      owners[a.storage().unsafeGetStorageImpl()] = t;
    }
    back[a.unsafeGetTensorImpl()] = t;
    return a;
  };
  bool device_arg = false;
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[begin + i];
    const auto& arg = schema.arguments()[i];
    bool w = arg.alias_info() && arg.alias_info()->isWrite();
    if (v.isTensor())
      v = turn(v.toTensor(), w);
    else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorVector()) l.push_back(turn(t, w));
      v = std::move(l);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> l;
      for (const auto& t : v.toOptionalTensorVector())
        l.push_back(t ? std::optional<at::Tensor>(turn(*t, w)) : std::nullopt);
      v = std::move(l);
    } else if (v.isDevice() && v.toDevice().type() == TYPE) {
      if (dev < 0 && v.toDevice().index() >= 0) dev = v.toDevice().index();
      device_arg = true;
      v = Device(at::kCPU);
    }
  }
  if (dev < 0) dev = cur_dev;
  touch(dev);
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[begin + i];
    const auto& ty = *schema.arguments()[i].type();
    bool gen = ty.str() == "Generator" || ty.str() == "Generator?";
    if (!gen) continue;
    at::Generator g = v.isNone() ? gens()[dev] : v.toGenerator();
    if (g.device().type() == TYPE) {
      Lock lock(everything);
      v = static_cast<Gen*>(g.unsafeGetGeneratorImpl())->next();
    }
  }
  {
    Lock lock(everything);
    auto* s = current(dev);
    auto e = launch(s);
    for (auto& [t, w] : used) touch_tensor(s, e, t, w, name);
    run_until(s, s->asked);
  }
  report();
  op.callBoxed(stack);
  for (auto& [a, t] : grown)
    if (a.numel()) {
      resize_(t, c10::fromIntArrayRefSlow(a.sizes()), std::nullopt);
      auto x = on_host(t);
      x.copy_(a);
    }
  const size_t m = schema.returns().size(), from = stack->size() - m;
  bool views = false;
  for (auto& r : schema.returns()) views |= r.alias_info() && !r.alias_info()->isWrite();
  auto home = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined() || t.device().type() != at::kCPU) return t;
    auto it = back.find(t.unsafeGetTensorImpl());
    if (it != back.end()) return it->second;
    if (used.empty() && !device_arg) return t;
    auto* si = t.storage().unsafeGetStorageImpl();
    if (owners.count(si)) {
      auto& o = owners[si];
      if (views) {
        auto v = at::native::as_strided_tensorimpl(o, t.sizes(), t.strides(), t.storage_offset());
        return v;
      }
    }
    c10::OptionalDeviceGuard g(Device(TYPE, dev));
    at::Tensor r = at::detail::empty_strided_generic(
        t.sizes(), t.strides(), &dev_alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        t.scalar_type());
    if (t.numel()) {
      Lock lock(everything);
      auto* s = current(dev);
      auto e = launch(s);
      touch_tensor(s, e, r, true, name);
      auto x = on_host(r);
      x.copy_(t);
    }
    return r;
  };
  for (size_t i = 0; i < m; i++) {
    auto& v = (*stack)[from + i];
    if (v.isTensor())
      v = home(v.toTensor());
    else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorVector()) l.push_back(home(t));
      v = std::move(l);
    } else if (v.isScalar()) {
      Lock lock(everything);
      join(host, current(dev)->clock);
    }  // item(): the host has waited
  }
  report();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", shallow);  // `parameter.data = ` of another device
}

// ---- collectives: another backend (gloo) on the device's memory
// ------------------------------------
struct DoneWork final : c10d::Work {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::vector<at::Tensor> out;
  explicit DoneWork(std::vector<at::Tensor> o) : out(std::move(o)) {
    future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(out));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return out; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};
using W = c10::intrusive_ptr<c10d::Work>;
using TV = std::vector<at::Tensor>;
using TVV = std::vector<TV>;
struct Ccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> in;
  Ccl(c10::intrusive_ptr<c10d::Backend> b, int r, int s) : c10d::Backend(r, s), in(std::move(b)) {}
  const std::string getBackendName() const override { return "simccl"; }
  at::Tensor a(const at::Tensor& t, bool w) {
    if (t.device().type() != TYPE) return t;
    TORCH_CHECK(t.is_contiguous() || t.is_non_overlapping_and_dense(), "sim: dense tensors only");
    {
      Lock lock(everything);
      auto* s = current(dev_of(t));
      auto e = launch(s);
      touch_tensor(s, e, t, w, "collective");
      sync_stream(s);
    }
    report();
    return on_host(t);
  }
  TV a(const TV& v, bool w) {
    TV r;
    for (auto& t : v) r.push_back(a(t, w));
    return r;
  }
  TVV a(const TVV& v, bool w) {
    TVV r;
    for (auto& t : v) r.push_back(a(t, w));
    return r;
  }
  static W done(W w, TV out) {
    w->wait();
    return c10::make_intrusive<DoneWork>(std::move(out));
  }
  static TV flat(const TVV& v) {
    TV r;
    for (auto& x : v) r.insert(r.end(), x.begin(), x.end());
    return r;
  }
  W broadcast(TV& t, const c10d::BroadcastOptions& o) override {
    auto x = a(t, true);
    return done(in->broadcast(x, o), t);
  }
  W allreduce(TV& t, const c10d::AllreduceOptions& o) override {
    auto x = a(t, true);
    auto p = o;
    bool avg = o.reduceOp == c10d::ReduceOp::AVG;
    if (avg) p.reduceOp = c10d::ReduceOp::SUM;
    auto w = done(in->allreduce(x, p), t);
    if (avg)
      for (auto& y : x) y.div_(getSize());
    return w;
  }
  W allreduce_coalesced(TV& t, const c10d::AllreduceCoalescedOptions& o) override {
    for (auto& y : t) {
      TV one{y};
      c10d::AllreduceOptions p;
      p.reduceOp = o.reduceOp;
      allreduce(one, p);
    }
    return c10::make_intrusive<DoneWork>(t);
  }
  W reduce(TV& t, const c10d::ReduceOptions& o) override {
    auto x = a(t, true);
    return done(in->reduce(x, o), t);
  }
  W allgather(TVV& o, TV& i, const c10d::AllgatherOptions& p) override {
    auto x = a(o, true);
    auto y = a(i, false);
    return done(in->allgather(x, y, p), flat(o));
  }
  W _allgather_base(at::Tensor& o, at::Tensor& i, const c10d::AllgatherOptions& p) override {
    auto x = a(o, true), y = a(i, false).clone().reshape({-1});
    auto f = x.reshape({-1});
    TVV outs(1);
    for (int k = 0; k < getSize(); k++) outs[0].push_back(at::empty_like(y));
    TV ins{y};
    in->allgather(outs, ins, p)->wait();
    f.copy_(at::cat(outs[0]));
    return c10::make_intrusive<DoneWork>(TV{o});
  }
  W allgather_into_tensor_coalesced(TV& o, TV& i, const c10d::AllgatherOptions& p) override {
    for (size_t k = 0; k < o.size(); k++) _allgather_base(o[k], i[k], p);
    return c10::make_intrusive<DoneWork>(o);
  }
  W gather(TVV& o, TV& i, const c10d::GatherOptions& p) override {
    auto x = a(o, true);
    auto y = a(i, false);
    return done(in->gather(x, y, p), flat(o));
  }
  W scatter(TV& o, TVV& i, const c10d::ScatterOptions& p) override {
    auto x = a(o, true);
    auto y = a(i, false);
    return done(in->scatter(x, y, p), o);
  }
  W _reduce_scatter_base(at::Tensor& o, at::Tensor& i,
                         const c10d::ReduceScatterOptions& p) override {
    auto x = a(o, true), y = a(i, false).clone().reshape({-1});
    bool avg = p.reduceOp == c10d::ReduceOp::AVG;
    TV t{y};
    c10d::AllreduceOptions q;
    q.reduceOp = avg ? c10d::ReduceOp(c10d::ReduceOp::SUM) : p.reduceOp;
    in->allreduce(t, q)->wait();
    if (avg) y.div_(getSize());
    x.reshape({-1}).copy_(y.chunk(getSize())[getRank()]);
    return c10::make_intrusive<DoneWork>(TV{o});
  }
  W reduce_scatter(TV& o, TVV& i, const c10d::ReduceScatterOptions& p) override {
    auto all = at::cat([&] {
      TV f;
      for (auto& t : i[0]) f.push_back(t.reshape({-1}));
      return f;
    }());
    return _reduce_scatter_base(o[0], all, p);
  }
  W reduce_scatter_tensor_coalesced(TV& o, TV& i, const c10d::ReduceScatterOptions& p) override {
    for (size_t k = 0; k < o.size(); k++) _reduce_scatter_base(o[k], i[k], p);
    return c10::make_intrusive<DoneWork>(o);
  }
  W alltoall_base(at::Tensor& o, at::Tensor& i, std::vector<int64_t>& os, std::vector<int64_t>& is,
                  const c10d::AllToAllOptions& p) override {
    auto x = a(o, true), y = a(i, false);
    return done(in->alltoall_base(x, y, os, is, p), {o});
  }
  W send(TV& t, int d, int g) override {
    auto x = a(t, false);
    return done(in->send(x, d, g), t);
  }
  W recv(TV& t, int s, int g) override {
    auto x = a(t, true);
    return done(in->recv(x, s, g), t);
  }
  W barrier(const c10d::BarrierOptions& o) override { return done(in->barrier(), {}); }
};
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(TYPE, &dev_alloc, 1);
  at::setHostAllocator(TYPE, &host_alloc, 1);
  m.def("init", [] { hooks.init(); });
  m.def("is_initialized", [] { return has_begun; });
  m.def("device_count", &num_devices);
  m.def("current_device", [] { return cur_dev; });
  m.def("set_device", [](int d) { hooks.setCurrentDevice(d); });
  m.def("exchange_device", [](int d) { return hooks.exchangeDevice(d); });
  m.def("synchronize", [](int d) {
    pybind11::gil_scoped_release g;
    sync_device(d < 0 ? cur_dev : d);
  });
  m.def("default_generator", [](int d) { return gens().at(d); });
  m.def(
      "used_devices",
      [](bool clear) {
        Lock lock(everything);
        auto r = used_devices;
        if (clear) used_devices.clear();
        return r;
      },
      pybind11::arg("clear") = false);
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("registered", [] {
    Lock lock(everything);
    return registered;
  });
  m.def("pending", [] {
    Lock lock(everything);
    size_t n = 0;
    for (auto& s : all_streams) n += s->tasks.size();
    return n;
  });
  m.def("host_allocated", [] { return host_allocated; });
  m.def(
      "races",
      [](bool clear) {
        Lock lock(everything);
        auto r = reports;
        r.insert(r.end(), lost.begin(), lost.end());
        if (clear) lost.clear();
        if (clear) reports.clear();
        return r;
      },
      pybind11::arg("clear") = true);
  m.def("make_backend",
        [](c10::intrusive_ptr<c10d::Backend> b, int r, int s) -> c10::intrusive_ptr<c10d::Backend> {
          return c10::make_intrusive<Ccl>(b, r, s);
        });
}
