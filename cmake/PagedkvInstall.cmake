# Installs the library, its headers, the CMake package and the pkg-config file: into a prefix, or, in a Python build,
# into the package itself (site-packages/pagedkv/{lib,include}).
include(CMakePackageConfigHelpers)

if(SKBUILD)
  # Wheels hold no symbolic links, so there it is one plain libpagedkv.so.
  set(package_prefix pagedkv/)
  set(libdir pagedkv/lib)
  set(includedir pagedkv/include)
else()
  set_target_properties(pagedkv PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
  set(package_prefix "")
  set(libdir ${CMAKE_INSTALL_LIBDIR})
  set(includedir ${CMAKE_INSTALL_INCLUDEDIR})
endif()
set(configdir ${libdir}/cmake/pagedkv)

install(TARGETS pagedkv EXPORT pagedkvTargets
        LIBRARY DESTINATION ${libdir} COMPONENT runtime NAMELINK_COMPONENT devel
        INCLUDES DESTINATION ${includedir})
install(DIRECTORY include/pagedkv DESTINATION ${includedir} COMPONENT devel)
install(EXPORT pagedkvTargets NAMESPACE pagedkv:: DESTINATION ${configdir} COMPONENT devel)

configure_package_config_file(cmake/pagedkvConfig.cmake.in pagedkvConfig.cmake INSTALL_DESTINATION ${configdir}
                              NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(pagedkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/pagedkvConfig.cmake" "${PROJECT_BINARY_DIR}/pagedkvConfigVersion.cmake"
        DESTINATION ${configdir} COMPONENT devel)

# The pkg-config file names its prefix relative to itself, so that a moved tree still works.
if(IS_ABSOLUTE "${libdir}" OR IS_ABSOLUTE "${includedir}")
  set(PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
  set(PC_LIBDIR "${CMAKE_INSTALL_FULL_LIBDIR}")
  set(PC_INCLUDEDIR "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
else()
  file(RELATIVE_PATH up "/${libdir}/pkgconfig" "/${package_prefix}")
  string(REGEX REPLACE "/$" "" up "${up}")
  set(PC_PREFIX "\${pcfiledir}/${up}")
  file(RELATIVE_PATH PC_LIBDIR "/${package_prefix}" "/${libdir}")
  file(RELATIVE_PATH PC_INCLUDEDIR "/${package_prefix}" "/${includedir}")
  string(PREPEND PC_LIBDIR "\${prefix}/")
  string(PREPEND PC_INCLUDEDIR "\${prefix}/")
endif()
configure_file(cmake/pagedkv.pc.in pagedkv.pc @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/pagedkv.pc" DESTINATION ${libdir}/pkgconfig COMPONENT devel)
