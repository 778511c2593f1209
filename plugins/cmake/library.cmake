# redraft_library(TARGET NAME...): a shared library that exports the C entries and NAMEs, and leaves nothing undefined.
function(redraft_library target)
  set(script "${CMAKE_CURRENT_BINARY_DIR}/${target}.exports")
  list(JOIN ARGN " " names)
  file(CONFIGURE OUTPUT "${script}" CONTENT "{ global: redraft_*; @names@ local: *; };\n" @ONLY)
  target_link_options(${target} PRIVATE LINKER:-z,defs "LINKER:--version-script=${script}")
  set_target_properties(${target} PROPERTIES OUTPUT_NAME redraft_${target} LINK_DEPENDS "${script}")
endfunction()
