# The built binary, run as a user would.
if(TARGET moe4_cli)
  find_package(nlohmann_json 3.11 REQUIRED)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*_test.cpp)
  moe4_test(cli cli ${sources})
  target_link_libraries(moe4_cli_test PRIVATE nlohmann_json::nlohmann_json)
  target_compile_definitions(moe4_cli_test PRIVATE MOE4_BINARY="$<TARGET_FILE:moe4_cli>"
    MOE4_SAMPLES="${PROJECT_SOURCE_DIR}/samples")
  add_dependencies(moe4_cli_test moe4_cli)
endif()
