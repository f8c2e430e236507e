# The module `_cuda`. AUTO builds it when nvcc is there and either a GPU is visible or architectures
# are named (CUDAARCHS or CMAKE_CUDA_ARCHITECTURES); ON insists; PYPI does so with nvcc from PyPI.
if(JAX_BATCHED_CUDA STREQUAL "OFF")
  return()
endif()
if(NOT JAX_BATCHED_CUDA MATCHES "^(AUTO|ON|PYPI)$")
  message(FATAL_ERROR "JAX_BATCHED_CUDA is '${JAX_BATCHED_CUDA}'; it may be AUTO, ON, PYPI or OFF")
endif()

if(JAX_BATCHED_CUDA STREQUAL "PYPI")
  execute_process(COMMAND nvidia-smi --query-gpu=driver_version --format=csv,noheader
                  OUTPUT_VARIABLE driver ERROR_QUIET RESULT_VARIABLE no_gpu)
  if(NOT no_gpu AND driver VERSION_LESS 580)
    message(FATAL_ERROR "JAX_BATCHED_CUDA=PYPI compiles for CUDA 13, which needs driver 580 or newer; "
                        "with an older one, install CUDA 12's toolkit and use JAX_BATCHED_CUDA=ON")
  endif()
  # The packages are build requirements then (pyproject.toml); they share one folder.
  execute_process(COMMAND "${Python_EXECUTABLE}" -c
                  "import nvidia.cu13; print(*nvidia.cu13.__path__, sep=';')"
                  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE folders)
  find_program(CMAKE_CUDA_COMPILER nvcc PATHS ${folders} PATH_SUFFIXES bin NO_DEFAULT_PATH REQUIRED)
  # Libraries are in `lib`, where nvcc does not look for those of CMake's trial programs. Only the
  # static runtime is there, where FindCUDAToolkit insists on a shared one.
  cmake_path(REPLACE_FILENAME CMAKE_CUDA_COMPILER ../lib OUTPUT_VARIABLE cuda_lib)
  set(ENV{LIBRARY_PATH} "${cuda_lib}:$ENV{LIBRARY_PATH}")
  set(CUDA_CUDART "${cuda_lib}/libcudart_static.a" CACHE FILEPATH "")
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(JAX_BATCHED_CUDA STREQUAL "ON")
    message(FATAL_ERROR "JAX_BATCHED_CUDA=ON needs nvcc: put it on PATH, name it in CUDACXX, or use PYPI")
  endif()
  message(STATUS "jax_batched: no nvcc, building without CUDA")
  return()
endif()

# Without a GPU: what wheels hold. sm_80, 90, 100 and 120 run on every GPU of their generations, and
# PTX of compute_100 on all others from there on.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE gpus OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
                  RESULT_VARIABLE no_gpu)
  if(no_gpu)
    if(JAX_BATCHED_CUDA STREQUAL "AUTO")
      message(STATUS "jax_batched: nvcc but no GPU and no CUDAARCHS, building without CUDA")
      return()
    endif()
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100 120-real)
  else()
    string(REPLACE "\n" ";" gpus "${gpus}")
    list(TRANSFORM gpus REPLACE "[. ]" "")
    list(REMOVE_DUPLICATES gpus)
    list(TRANSFORM gpus APPEND "-real")
    set(CMAKE_CUDA_ARCHITECTURES ${gpus})
  endif()
endif()

set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

set(cuda_flags -O3 -Xfatbin=-compress-all)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # Drivers of CUDA 12 need not read this mode; all of CUDA 13 do.
  list(APPEND cuda_flags --compress-mode=size)
endif()

set(scalar_f32 float)
set(scalar_f64 double)
set(scalar_c64 "jax_batched::Complex<float>")
set(scalar_c128 "jax_batched::Complex<double>")
set(scalar_f16 "jax_batched::Float16")
set(scalar_bf16 "jax_batched::BFloat16")

add_library(cuda_clear OBJECT ffi/cuda/clear.cu)
target_include_directories(cuda_clear PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_options(cuda_clear PRIVATE ${cuda_flags})
set(cuda_objects $<TARGET_OBJECTS:cuda_clear>)

# One object for each element type of a launcher: they compile side by side. A family whose
# launchers take others than these four says so in its launchers.cmake.
file(GLOB launchers CONFIGURE_DEPENDS ffi/cuda/*/*.cu)
foreach(file IN LISTS launchers)
  get_filename_component(family ${file} DIRECTORY)
  get_filename_component(operation ${file} NAME_WE)
  set(scalars_${operation} f32 f64 c64 c128)
  include(${family}/launchers.cmake OPTIONAL)
  foreach(scalar IN LISTS scalars_${operation})
    set(target cuda_${operation}_${scalar})
    add_library(${target} OBJECT ${file})
    target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
    target_compile_definitions(${target} PRIVATE "JAX_BATCHED_SCALAR=${scalar_${scalar}}")
    target_compile_options(${target} PRIVATE ${cuda_flags})
    list(APPEND cuda_objects $<TARGET_OBJECTS:${target}>)
  endforeach()
endforeach()

nanobind_add_module(_cuda STABLE_ABI NB_STATIC ffi/cuda/handlers.cc ffi/cuda/runtime/tuned.cc
                    ${cuda_objects})
jax_batched_target(_cuda)
target_link_libraries(_cuda PRIVATE CUDA::cudart_static)
install(TARGETS _cuda LIBRARY DESTINATION jax_batched)
