moe4_test(allocations unit ${CMAKE_CURRENT_LIST_DIR}/allocations.cpp)

function(moe4_isa_isolation_test name source flags)
  add_test(NAME isa_isolation.${name} COMMAND ${CMAKE_COMMAND} -DCOMPILER=${CMAKE_CXX_COMPILER} -DNM=${CMAKE_NM}
    -DSOURCE=${source} -DOWN_NAMESPACE=moe4::cpu::${name} "-DFLAGS=${flags}"
    "-DINCLUDES=${PROJECT_SOURCE_DIR}/src;${PROJECT_SOURCE_DIR}/include" -DWORK_DIR=${CMAKE_CURRENT_BINARY_DIR}/isa
    -P ${CMAKE_CURRENT_SOURCE_DIR}/isa_isolation.cmake)
  set_tests_properties(isa_isolation.${name} PROPERTIES LABELS unit)
endfunction()

# Every file of kernels with flags of its own.
get_property(folders GLOBAL PROPERTY MOE4_FOLDERS)
list(FILTER folders INCLUDE REGEX "^moe4_cpu_")
foreach(folder IN LISTS folders)
  get_target_property(flags ${folder} COMPILE_OPTIONS)
  string(GENEX_STRIP "${flags}" flags)
  list(FILTER flags INCLUDE REGEX "^-m")
  if(NOT flags)
    continue()
  endif()
  get_target_property(source ${folder} SOURCES)
  get_target_property(source_dir ${folder} SOURCE_DIR)
  string(REPLACE "moe4_cpu_" "" isa ${folder})
  moe4_isa_isolation_test(${isa} ${source_dir}/${source} "${flags}")
endforeach()

moe4_isa_isolation_test(leak ${CMAKE_CURRENT_LIST_DIR}/isa_leak.cpp "")
set_tests_properties(isa_isolation.leak PROPERTIES PASS_REGULAR_EXPRESSION "isa_leak.cpp leaks:.*std::min<int>")
