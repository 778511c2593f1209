// Messages of the plugin: to TensorRT's logger where there is one, else to standard error.

#pragma once

#include <NvInferRuntime.h>

namespace redraft {

// Given by TensorRT when it loads the library.
void use_logger_finder(nvinfer1::ILoggerFinder *finder);

void say(nvinfer1::ILogger::Severity severity, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Says what was expected and what was found, and returns false.
bool refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Major version of the TensorRT that calls; `caller` is an address inside it. NV_TENSORRT_MAJOR where it is not TensorRT.
int caller_major(const void *caller);

}  // namespace redraft
