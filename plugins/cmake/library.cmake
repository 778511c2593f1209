# redraft_library(TARGET NAME...): a shared library that exports the C entries and NAMEs, and leaves nothing undefined.
function(redraft_library target)
  set(script "${CMAKE_CURRENT_BINARY_DIR}/${target}.exports")
  set(names "redraft_*" ${ARGN})
  list(JOIN names "; " names)
  file(CONFIGURE OUTPUT "${script}" CONTENT "{ global: ${names}; local: *; };\n")
  target_link_options(${target} PRIVATE LINKER:-z,defs "LINKER:--version-script=${script}")
  set_target_properties(${target} PROPERTIES OUTPUT_NAME redraft_${target} LINK_DEPENDS "${script}")
endfunction()
