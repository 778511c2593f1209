# TENSORRT_INCLUDE_DIR and TENSORRT_MAJOR if TensorRT's headers are found; else TENSORRT_MISSING names the package to
# install. The library itself is not needed: TensorRT gives a plugin all objects that it calls.

if(TENSORRT_ROOT)
  find_path(TENSORRT_INCLUDE_DIR NvInferRuntime.h PATHS "${TENSORRT_ROOT}" NO_DEFAULT_PATH NO_CACHE
            PATH_SUFFIXES include include/x86_64-linux-gnu include/aarch64-linux-gnu)
  if(NOT TENSORRT_INCLUDE_DIR)
    message(FATAL_ERROR "TENSORRT_ROOT: expected a folder that has include/NvInferRuntime.h, found ${TENSORRT_ROOT}")
  endif()
else()
  find_path(TENSORRT_INCLUDE_DIR NvInferRuntime.h NO_CACHE
            PATHS /usr/include/x86_64-linux-gnu /usr/include/aarch64-linux-gnu /usr/local/tensorrt/include)
endif()
if(NOT TENSORRT_INCLUDE_DIR)
  set(TENSORRT_MISSING "NvInferRuntime.h was not found, install TensorRT's headers (libnvinfer-headers-dev, or the tar \
file) and name their folder: make plugins TENSORRT_ROOT=dir")
  return()
endif()

# Either of the two: in later versions, the first defines the second.
file(STRINGS "${TENSORRT_INCLUDE_DIR}/NvInferVersion.h" version
     REGEX "^#define (TRT_MAJOR_ENTERPRISE|NV_TENSORRT_MAJOR) +[0-9]+" LIMIT_COUNT 1)
string(REGEX MATCH "[0-9]+" TENSORRT_MAJOR "${version}")
