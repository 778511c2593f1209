// Messages of the plugin: to TensorRT's logger where there is one, else to standard error.

#pragma once

#include <NvInferRuntime.h>

namespace redraft {

// Given by TensorRT when it loads the library.
void use_logger_finder(nvinfer1::ILoggerFinder *finder);

void say(nvinfer1::ILogger::Severity severity, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Says what was expected and what was found, and returns false.
bool refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Whether the TensorRT that calls has the major version that this library was compiled for. The interfaces differ: the
// loggers of 11 crash in 10. `caller` is an address inside the caller; one that is not TensorRT passes.
bool compiled_for(const void *caller);

}  // namespace redraft
