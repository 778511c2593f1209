# One line for each library. Included while configuring, it collects them. `cmake -P summary.cmake` in the build
# folder prints them once all is built.

# built(TARGET WHAT): the library of TARGET will be built; WHAT names its machines.
function(built target what)
  set_property(GLOBAL APPEND_STRING PROPERTY REDRAFT_SUMMARY "line_built([[$<TARGET_FILE:${target}>]] [[${what}]])\n")
endfunction()

# skipped(FILE WHY): the library FILE will not be built; WHY ends with the package to install.
function(skipped file why)
  set_property(GLOBAL APPEND_STRING PROPERTY REDRAFT_SUMMARY "message(NOTICE [[skipped  ${file}: ${why}]])\n")
endfunction()

function(write_summary)
  get_property(lines GLOBAL PROPERTY REDRAFT_SUMMARY)
  file(GENERATE OUTPUT "${CMAKE_BINARY_DIR}/summary.cmake"
       CONTENT "include([[${CMAKE_CURRENT_FUNCTION_LIST_FILE}]])\n${lines}")
endfunction()

function(line_built file what)
  file(SIZE "${file}" bytes)
  math(EXPR whole "${bytes} / 1000000")
  math(EXPR tenths "${bytes} / 100000 % 10")
  cmake_path(RELATIVE_PATH file BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}")
  message(NOTICE "built    ${file}  ${whole}.${tenths} MB  ${what}")
endfunction()
