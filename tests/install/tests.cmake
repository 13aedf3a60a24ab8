# The installed and the embedded library, each used by a project of a few lines.
add_test(NAME install.find_package COMMAND ${CMAKE_COMMAND} -DBUILD_DIR=${PROJECT_BINARY_DIR}
  -DSOURCE_DIR=${PROJECT_SOURCE_DIR} -DWORK_DIR=${CMAKE_CURRENT_BINARY_DIR}/install
  -DCOMPILER=${CMAKE_CXX_COMPILER} -DFLAGS=${CMAKE_CXX_FLAGS} -P ${CMAKE_CURRENT_LIST_DIR}/run.cmake)
# The embedded one as on a machine that is no x86: the scalar kernels build, link and run by themselves.
add_test(NAME install.add_subdirectory COMMAND ${CMAKE_CTEST_COMMAND} --build-and-test
  ${CMAKE_CURRENT_LIST_DIR}/add_subdirectory ${CMAKE_CURRENT_BINARY_DIR}/add_subdirectory
  --build-generator ${CMAKE_GENERATOR} --build-noclean --build-options -DMOE4_SOURCE_DIR=${PROJECT_SOURCE_DIR}
  -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER} -DMOE4_CUDA=OFF
  -DMOE4_SCALAR_ONLY=ON
  --test-command run_one_layer ${PROJECT_SOURCE_DIR}/samples/tiny-modelopt)
set_tests_properties(install.add_subdirectory PROPERTIES PASS_REGULAR_EXPRESSION
  "\nscalar_w4a16: any number of tokens an expert\nweights: the checkpoint's own, [^\n]*\n[^\n]*\nlayer 0: output")
set_tests_properties(install.find_package install.add_subdirectory PROPERTIES LABELS install TIMEOUT 900)
