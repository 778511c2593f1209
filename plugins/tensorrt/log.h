// Messages of the plugin: to TensorRT's logger if it has one, else to standard error.

#pragma once

#include <NvInferRuntime.h>

namespace redraft {

// TensorRT sets it when it loads the library.
void use_logger_finder(nvinfer1::ILoggerFinder *finder);

void say(nvinfer1::ILogger::Severity severity, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Logs the expected and the found value, and returns false.
bool refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Major version of the calling TensorRT; `caller` is an address inside it. NV_TENSORRT_MAJOR for other callers.
int caller_major(const void *caller);

}  // namespace redraft
