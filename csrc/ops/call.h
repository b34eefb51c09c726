// Calls operators through torch's dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

namespace amp_kernels {

struct OperatorName {
  const char* name;
  const char* overload = "";
};

template <class Result, size_t... kIndices>
Result results_of(const StableIValue* stack, std::index_sequence<kIndices...>) {
  using torch::stable::detail::to;
  return {to<std::tuple_element_t<kIndices, Result>>(stack[kIndices])...};
}

template <class T>
struct IsTuple : std::false_type {};
template <class... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};

// How many results an operator with this return type has.
template <class T>
constexpr size_t kResults = 1;
template <class... T>
constexpr size_t kResults<std::tuple<T...>> = sizeof...(T);

// Calls an operator through the dispatcher, and returns its results.
template <class Result, class... Arguments>
Result call(const OperatorName& name, const Arguments&... arguments) {
  constexpr size_t kSize = std::max(sizeof...(Arguments), kResults<Result>);
  std::array<StableIValue, kSize> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name.name, name.overload, stack.data(), TORCH_ABI_VERSION));
  if constexpr (IsTuple<Result>::value) {
    return results_of<Result>(stack.data(), std::make_index_sequence<std::tuple_size_v<Result>>());
  } else if constexpr (!std::is_void_v<Result>) {
    return torch::stable::detail::to<Result>(stack[0]);
  }
}

}  // namespace amp_kernels
