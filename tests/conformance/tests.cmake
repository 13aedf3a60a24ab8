moe4_test(conformance conformance ${CMAKE_CURRENT_LIST_DIR}/conformance_test.cpp)
