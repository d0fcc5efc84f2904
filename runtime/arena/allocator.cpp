// torch's allocator of the CPU, which in a step gives what is asked for its place in an arena.
//
// One step is recorded: what its thread asks for, action by action, and when each piece is freed. In
// later steps the same requests get the places that were found for them. A place is given only where
// no byte of it is in use: the arena knows what has been given and not freed, whoever holds it. All
// else comes from the allocator that was there before. So a wrong plan takes more memory, and no
// value is ever written over.

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

struct Request {
  int64_t action, bytes, start, stop;  // when it was made and freed; -1 where it outlives the step
};

struct Place {
  int64_t bytes, offset;  // -1 where it has none
};

struct Arena {
  std::vector<std::vector<Place>> places;  // by action
  c10::DataPtr memory;
  int64_t size = 0;
  std::map<int64_t, int64_t> used;  // begins and ends of what is given and not freed
  int64_t given = 0, missed = 0, missed_bytes = 0;  // in the last step
  bool dropped = false;   // it goes with the last of what is in use
  bool poisoned = false;  // what is freed is overwritten, so that who reads it still is seen
};

struct State {
  std::mutex lock;
  at::Allocator* below = nullptr;
  std::map<char*, Arena*> arenas;  // by where they begin
  bool recording = false;
  int64_t now = 0;
  std::vector<Request> requests;
  std::unordered_map<void*, size_t> open;  // of what is recorded and not freed
};

State& state() {
  static State* found = new State;  // never destroyed: tensors outlive it
  return *found;
}

thread_local bool records = false;
thread_local Arena* current = nullptr;
thread_local int64_t action = 0;
thread_local size_t turn = 0;

Arena* arena_of(void* at) {
  auto& arenas = state().arenas;
  auto next = arenas.upper_bound(static_cast<char*>(at));
  if (next == arenas.begin()) return nullptr;
  Arena* found = std::prev(next)->second;
  char* begin = static_cast<char*>(found->memory.get());
  return static_cast<char*>(at) < begin + found->size ? found : nullptr;
}

// Lets go of an arena that nobody uses any more; the lock is held.
void forget(Arena* arena) {
  if (!arena->dropped || !arena->used.empty()) return;
  state().arenas.erase(static_cast<char*>(arena->memory.get()));
  delete arena;
}

void release(void* at) {
  auto& s = state();
  {
    std::lock_guard<std::mutex> guard(s.lock);
    if (Arena* arena = arena_of(at)) {
      auto own = arena->used.find(static_cast<char*>(at) - static_cast<char*>(arena->memory.get()));
      if (arena->poisoned) std::memset(at, 0xff, own->second - own->first);
      arena->used.erase(own);
      forget(arena);
      return;
    }
    if (s.recording) {
      auto found = s.open.find(at);
      if (found != s.open.end()) {
        s.requests[found->second].stop = s.now++;
        s.open.erase(found);
      }
    }
  }
  s.below->raw_deleter()(at);
}

c10::DataPtr data(void* at) { return {at, at, &release, c10::Device(c10::kCPU)}; }

// The place of the next request, or null.
void* placed(Arena& arena, int64_t bytes) {
  std::lock_guard<std::mutex> guard(state().lock);
  if (action < static_cast<int64_t>(arena.places.size()) && turn < arena.places[action].size()) {
    const Place& place = arena.places[action][turn++];
    if (place.bytes == bytes && place.offset < 0) return nullptr;
    if (place.bytes == bytes && place.offset + bytes <= arena.size) {
      int64_t begin = place.offset, end = begin + bytes;
      auto next = arena.used.lower_bound(begin);
      bool free = next == arena.used.end() || next->first >= end;
      if (free && (next == arena.used.begin() || std::prev(next)->second <= begin)) {
        arena.used.emplace_hint(next, begin, end);
        arena.given++;
        return static_cast<char*>(arena.memory.get()) + begin;
      }
    }
  }
  arena.missed++;
  arena.missed_bytes += bytes;
  return nullptr;
}

struct Places : at::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto& s = state();
    if (current != nullptr && bytes > 0) {
      if (void* at = placed(*current, static_cast<int64_t>(bytes))) return data(at);
    }
    c10::DataPtr made = s.below->allocate(bytes);
    if (!records || bytes == 0) return made;
    void* at = made.release_context();
    std::lock_guard<std::mutex> guard(s.lock);
    s.open[at] = s.requests.size();
    s.requests.push_back({action, static_cast<int64_t>(bytes), s.now++, -1});
    return data(at);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

extern "C" {

// Puts itself before the allocator that is there, once. Whether that is one whose memory is its own
// context, as of torch's.
bool arena_install() {
  auto& s = state();
  if (s.below != nullptr) return true;
  at::Allocator* below = c10::GetCPUAllocator();
  c10::DataPtr probe = below->allocate(64);
  if (below->raw_deleter() == nullptr || probe.get() != probe.get_context()) return false;
  s.below = below;
  c10::SetCPUAllocator(new Places);
  // A child has none of the threads that may be freeing now.
  pthread_atfork([] { state().lock.lock(); }, [] { state().lock.unlock(); },
                 [] { state().lock.unlock(); });
  return true;
}

// Records what this thread asks for from now on; false where another thread does.
bool arena_record() {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.lock);
  if (s.recording) return false;
  s.recording = records = true;
  s.requests.clear();
  s.open.clear();
  s.now = action = 0;
  return true;
}

// Ends that, but for what is freed, which is noted still; when it is.
int64_t arena_recorded() {
  std::lock_guard<std::mutex> guard(state().lock);
  records = false;
  return state().now++;
}

// Ends that, too; how many requests there were.
int64_t arena_count() {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.lock);
  s.recording = false;
  s.open.clear();
  return static_cast<int64_t>(s.requests.size());
}

// Four numbers a request: the action, bytes, when it was made and freed.
void arena_requests(int64_t* into) {
  for (const Request& own : state().requests) {
    *into++ = own.action, *into++ = own.bytes, *into++ = own.start, *into++ = own.stop;
  }
}

// An arena; `places` has three numbers a request: the action, bytes, the offset.
void* arena_make(int64_t size, int64_t count, const int64_t* places, bool poisoned) {
  auto& s = state();
  auto* made = new Arena;
  made->size = size, made->poisoned = poisoned;
  for (int64_t k = 0; k < count; k++, places += 3) {
    if (places[0] >= static_cast<int64_t>(made->places.size())) made->places.resize(places[0] + 1);
    made->places[places[0]].push_back({places[1], places[2]});
  }
  made->memory = s.below->allocate(size);
  std::lock_guard<std::mutex> guard(s.lock);
  s.arenas[static_cast<char*>(made->memory.get())] = made;
  return made;
}

// This thread's requests get their places in an arena from now on; null ends that.
void arena_begin(void* arena) {
  current = static_cast<Arena*>(arena);
  action = 0, turn = 0;
  if (current != nullptr) {
    std::lock_guard<std::mutex> guard(state().lock);
    current->given = current->missed = current->missed_bytes = 0;
  }
}

// The next requests are those of this action.
void arena_action(int64_t number) { action = number, turn = 0; }

// Requests of the last step that were placed, those that were not, and the bytes of these.
void arena_figures(void* arena, int64_t* into) {
  std::lock_guard<std::mutex> guard(state().lock);
  auto* own = static_cast<Arena*>(arena);
  into[0] = own->given, into[1] = own->missed, into[2] = own->missed_bytes;
}

// Lets go of an arena, once nothing in it is in use.
void arena_drop(void* arena) {
  std::lock_guard<std::mutex> guard(state().lock);
  static_cast<Arena*>(arena)->dropped = true;
  forget(static_cast<Arena*>(arena));
}
}
