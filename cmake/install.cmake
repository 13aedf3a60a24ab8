# What `cmake --install` leaves: the library, its headers, moe4Config.cmake, moe4.pc and the command line.
include(CMakePackageConfigHelpers)
install(TARGETS moe4 EXPORT moe4Targets)
install(DIRECTORY include/moe4 TYPE INCLUDE)
install(FILES ${PROJECT_BINARY_DIR}/include/moe4/version.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moe4)
if(MOE4_CLI)
  install(TARGETS moe4_cli)
endif()
install(EXPORT moe4Targets NAMESPACE moe4:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/moe4)
configure_package_config_file(cmake/moe4Config.cmake.in moe4Config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/moe4)
write_basic_package_version_file(moe4ConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/moe4Config.cmake ${PROJECT_BINARY_DIR}/moe4ConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/moe4)
configure_file(cmake/moe4.pc.in moe4.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/moe4.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
