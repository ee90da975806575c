# What `cmake --install` lays down: headers, the library, find_package(gdn) and pkg-config. All of it is relocatable.
if(SKBUILD)
  set(CMAKE_INSTALL_LIBDIR lib)  # in a wheel the prefix is the package folder, whose layout the Python code relies on
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(_gdn_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/gdn)
install(TARGETS gdn EXPORT gdnTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/gdn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT gdnTargets NAMESPACE gdn:: DESTINATION ${_gdn_cmake_dir})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/gdnConfig.cmake.in ${PROJECT_BINARY_DIR}/gdnConfig.cmake
                              INSTALL_DESTINATION ${_gdn_cmake_dir})
# Before 1.0 a minor version may break the C++ layer: 0.1 serves 0.1.x only.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gdnConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/gdnConfig.cmake ${PROJECT_BINARY_DIR}/gdnConfigVersion.cmake DESTINATION ${_gdn_cmake_dir})

file(RELATIVE_PATH GDN_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" GDN_PC_PREFIX "${GDN_PC_PREFIX}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/gdn.pc.in ${PROJECT_BINARY_DIR}/gdn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/gdn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
