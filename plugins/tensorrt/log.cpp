#include "log.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>

#include <atomic>

namespace redraft {

namespace {

using Severity = nvinfer1::ILogger::Severity;

std::atomic<nvinfer1::ILoggerFinder *> logger_finder{nullptr};

void say_values(Severity severity, const char *format, va_list values) {
  char message[512];
  const int prefix = snprintf(message, sizeof message, "redraft TreeAttention: ");
  vsnprintf(message + prefix, sizeof message - prefix, format, values);
  nvinfer1::ILoggerFinder *finder = logger_finder.load();
  nvinfer1::ILogger *logger = finder ? finder->findLogger() : nullptr;
  if (logger) {
    logger->log(severity, message);
  } else {
    fprintf(stderr, "%s\n", message);
  }
}

}  // namespace

void use_logger_finder(nvinfer1::ILoggerFinder *finder) { logger_finder = finder; }

void say(Severity severity, const char *format, ...) {
  va_list values;
  va_start(values, format);
  say_values(severity, format, values);
  va_end(values);
}

bool refuse(const char *format, ...) {
  va_list values;
  va_start(values, format);
  say_values(Severity::kERROR, format, values);
  va_end(values);
  return false;
}

int caller_major(const void *caller) {
  Dl_info info{};
  if (!dladdr(caller, &info) || !info.dli_fname) return NV_TENSORRT_MAJOR;
  void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return NV_TENSORRT_MAJOR;
  const auto version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibMajorVersion"));
  const int major = version ? version() : NV_TENSORRT_MAJOR;
  dlclose(library);
  return major;
}

}  // namespace redraft
