# The module `_cpu`. The fast kernels, a file per operation, are compiled once per instruction set; the
# choice is made at load time.
set(isa_baseline_flags "")
set(isas baseline)
# Other widths of the same code are left out under sanitizers, where they compile for many minutes.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT JAX_BATCHED_SANITIZE)
  list(APPEND isas avx2 avx512)
  # PREFETCHW is in no level; processors that lack it take it for a no-op.
  set(isa_avx2_flags -march=x86-64-v3 -mprfchw)
  set(isa_avx512_flags -march=x86-64-v4 -mprfchw)
endif()

file(GLOB kernel_sources CONFIGURE_DEPENDS ffi/cpu/*.cc)
list(FILTER kernel_sources EXCLUDE REGEX "/handlers\\.cc$")
list(APPEND kernel_sources ffi/cpu/engine/kernels.cc)
# What these have in common, substitutions above all, is compiled once.
set_source_files_properties(ffi/cpu/cho_solve.cc ffi/cpu/cholesky.cc ffi/cpu/cholesky_pullback.cc
                            ffi/cpu/solve_pos.cc ffi/cpu/triangular_solve.cc
                            PROPERTIES UNITY_GROUP cholesky)
file(GLOB reference_sources CONFIGURE_DEPENDS ffi/cpu/reference/*.cc)
set(kernel_objects "")
foreach(isa IN LISTS isas)
  add_library(kernels_${isa} OBJECT ${kernel_sources})
  jax_batched_target(kernels_${isa})
  target_compile_definitions(kernels_${isa} PRIVATE JAX_BATCHED_ISA=${isa})
  set_target_properties(kernels_${isa} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # -ffp-contract=off: only the FMAs that the source writes. No errno, no traps: sqrt and selects
  # vectorise; results are unchanged.
  target_compile_options(kernels_${isa} PRIVATE ${isa_${isa}_flags} -O3 -ffp-contract=off
                                                -fno-math-errno -fno-trapping-math)
  list(APPEND kernel_objects $<TARGET_OBJECTS:kernels_${isa}>)
  list(APPEND cpu_targets kernels_${isa})
endforeach()

# The module also tells Python what the kernels of CUDA serve.
file(GLOB policies RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS ffi/cuda/*/policy.h)
list(TRANSFORM policies REPLACE "(.+)" "#include \"\\1\"")
list(JOIN policies "\n" policies)
file(CONFIGURE OUTPUT generated/cuda_policies.h CONTENT "${policies}\n" @ONLY)

nanobind_add_module(_cpu STABLE_ABI NB_STATIC NOMINSIZE ffi/cpu/handlers.cc ffi/cpu/engine/select.cc
                    ffi/cuda/runtime/tuned.cc ${reference_sources} ${kernel_objects})
jax_batched_target(_cpu)
target_include_directories(_cpu PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
foreach(isa IN LISTS isas)
  target_compile_definitions(_cpu PRIVATE JAX_BATCHED_HAS_${isa})
endforeach()
list(APPEND cpu_targets _cpu)
if(JAX_BATCHED_SANITIZE)
  # Null pointers and the ends of objects are the address sanitizer's; twice, they compile slowly.
  if(JAX_BATCHED_SANITIZE MATCHES "address")
    set(found_by_address -fno-sanitize=null,object-size)
  endif()
  foreach(target IN LISTS cpu_targets)
    target_compile_options(${target} PRIVATE -fsanitize=${JAX_BATCHED_SANITIZE} ${found_by_address}
                                             -fno-sanitize-recover=all -O1 -g1)
  endforeach()
  target_link_options(_cpu PRIVATE -fsanitize=${JAX_BATCHED_SANITIZE})
endif()
install(TARGETS _cpu LIBRARY DESTINATION jax_batched)
