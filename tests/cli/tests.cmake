# The built binary, run as a user would.
if(TARGET moe4_cli)
  find_package(fmt 9 REQUIRED)
  find_package(nlohmann_json 3.11 REQUIRED)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*_test.cpp)
  moe4_test(cli cli ${sources} ${PROJECT_SOURCE_DIR}/cli/bench_layer.cpp)
  target_include_directories(moe4_cli_test PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(moe4_cli_test PRIVATE nlohmann_json::nlohmann_json fmt::fmt-header-only)
  target_compile_definitions(moe4_cli_test PRIVATE MOE4_BINARY="$<TARGET_FILE:moe4_cli>"
    MOE4_SAMPLES="${PROJECT_SOURCE_DIR}/samples" MOE4_HAS_CUDA=$<TARGET_EXISTS:moe4_cuda_sm90>)
  add_dependencies(moe4_cli_test moe4_cli)
endif()
