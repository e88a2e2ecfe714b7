// Lets torch run autograd on fake tensors whose device is CUDA, on a machine without a GPU.
//
// torch asks a device guard for the current device and stream of a thread, and CUDA hooks whether
// a GPU exists. A CPU build has neither, and those of a CUDA build need a driver. This file
// registers a guard with one device, whose streams are numbers and whose events do nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

std::atomic<StreamId> last_stream{0};
// As in CUDA, each thread has its own current stream. 0 is the default stream.
thread_local StreamId current_stream = 0;

Device gpu() {
  return Device(DeviceType::CUDA, 0);
}

Stream make_stream(StreamId id) {
  return Stream(Stream::UNSAFE, gpu(), id);
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return gpu(); }
  Device getDevice() const override { return gpu(); }
  Stream getDefaultStream(Device) const override { return make_stream(0); }
  Stream getStream(Device) const noexcept override { return make_stream(current_stream); }
  Stream getNewStream(Device, int) const override { return make_stream(++last_stream); }
  Stream exchangeStream(Stream stream) const noexcept override {
    Stream before = make_stream(current_stream);
    current_stream = stream.id();
    return before;
  }
  // Autograd records an event where a gradient passes from one stream to another.
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
};
Guard guard;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  // A CUDA build asks for them when it chooses a kernel of attention. 0 means that there is none.
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
};

}  // namespace

namespace at {
using ::CUDAHooks;
// A CUDA build of torch registers its own hooks later. These take precedence.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}  // namespace at

// A CUDA build of torch registers its own guard while it is imported, so call this after that.
extern "C" void install_guard() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
}
