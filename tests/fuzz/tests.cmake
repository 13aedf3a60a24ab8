# libFuzzer targets, built with clang and -DMOE4_FUZZ=ON (preset fuzz): build/fuzz/fuzz/<name>_fuzz.
if(MOE4_FUZZ)
  add_custom_target(fuzzers)
  file(GLOB targets CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*_fuzz.cpp)
  foreach(target IN LISTS targets)
    cmake_path(GET target STEM name)
    add_executable(${name} EXCLUDE_FROM_ALL ${target})
    target_link_libraries(${name} PRIVATE moe4_checkpoint moe4_moe moe4_format moe4_options)  # no kernels to wait for
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzz)
    add_dependencies(fuzzers ${name})
  endforeach()
endif()
